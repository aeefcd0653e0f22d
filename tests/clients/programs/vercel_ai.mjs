// Vercel's AI SDK with three of its providers, by default settings.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { FIRST, KEY, MODEL, QUESTION, TOOLS, Task, URL, WORDS, check, ensure, expect, rejects } from './checks.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: `${URL}/v1`, apiKey: 'none' };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ name: 'longreach', ...settings, supportsStructuredOutputs: true, includeUsage: true });
const anthropic = createAnthropic(settings);
const Key = z.object({ kind: z.literal('pass key'), number: z.number().int() });
const toolsOf = (task) => Object.fromEntries(TOOLS.map(({ name, description, schema }) => [name, tool({
  description,
  inputSchema: z.object(Object.fromEntries(schema.required.map((member) => [member, z.string()]))),
  execute: async (input) => task.run(name, input),
})]));

const models = [
  ['chat, `@ai-sdk/openai-compatible`', (name) => compatible(name)],
  ['responses, `@ai-sdk/openai`', (name) => openai(name)],
  ['chat, `@ai-sdk/openai`', (name) => openai.chat(name)],
  ['messages, `@ai-sdk/anthropic`', (name) => anthropic(name)],
];
for (const [protocol, make] of models) {
  const common = { model: make(MODEL), maxRetries: 0 };

  await check(protocol, 'answer', async () => {
    expect(KEY, (await generateText({ ...common, prompt: QUESTION })).text);
  }, WORDS);

  await check(protocol, 'stream', async () => {
    const result = streamText({ ...common, prompt: QUESTION, onError: () => {} });
    let text = '';
    for await (const part of result.fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'text-delta') text += part.text;
    }
    expect(KEY, text);
    ensure((await result.usage).outputTokens > 0, JSON.stringify(await result.usage));
  }, WORDS);

  await check(protocol, 'tool loop', async () => {
    const task = new Task();
    const made = await generateText({ ...common, prompt: task.prompt, tools: toolsOf(task), stopWhen: stepCountIs(6) });
    task.finish(made.text);
  });

  await check(protocol, 'tool loop, streamed', async () => {
    const task = new Task();
    const result = streamText({
      ...common, prompt: task.prompt, tools: toolsOf(task), stopWhen: stepCountIs(6), onError: () => {},
    });
    for await (const part of result.fullStream) if (part.type === 'error') throw part.error;
    task.finish(await result.text);
  });

  await check(protocol, 'structured output', async () => {
    const made = await generateText({ ...common, prompt: QUESTION, output: Output.object({ schema: Key }) });
    ensure(made.output.number === Number(KEY), made.text);
  });

  await check(protocol, 'tool loop with structured output', async () => {
    const task = new Task();
    const made = await generateText({
      ...common,
      prompt: task.prompt,
      tools: toolsOf(task),
      stopWhen: stepCountIs(6),
      output: Output.object({ schema: Key }),
    });
    task.finish(made.output.number);
  });

  await check(protocol, 'second turn', async () => {
    const first = await generateText({ ...common, prompt: QUESTION });
    const messages = [{ role: 'user', content: QUESTION }, ...first.response.messages, { role: 'user', content: FIRST }];
    expect(KEY, (await generateText({ ...common, messages })).text);
  });

  await check(protocol, 'second turn after tools', async () => {
    const task = new Task();
    const tools = toolsOf(task);
    const first = await generateText({ ...common, prompt: task.prompt, tools, stopWhen: stepCountIs(6) });
    const messages = [{ role: 'user', content: task.prompt }, ...first.response.messages, { role: 'user', content: FIRST }];
    expect('Read the file', (await generateText({ ...common, messages, tools })).text);
  });

  await check(protocol, 'errors', async () => {
    await rejects(['AI_APICallError'], 'gpt-4o', () =>
      generateText({ model: make('gpt-4o'), prompt: QUESTION, maxRetries: 0 }));
  });
}
process.exit(0);

// The official Anthropic package for Node.
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { z } from 'zod';
import { FIRST, KEY, MODEL, QUESTION, TOOLS, Task, URL, WORDS, check, ensure, expect, rejects } from './checks.mjs';

const client = new Anthropic({ baseURL: URL, apiKey: 'none', maxRetries: 0 });
const asked = [{ role: 'user', content: QUESTION }];
const tools = TOOLS.map(({ name, description, schema }) => ({ name, description, input_schema: schema }));
const common = { model: MODEL, max_tokens: 4096 };
const Key = z.object({ kind: z.literal('pass key'), number: z.number().int() });
const words = (message) => message.content.filter((block) => block.type === 'text').map((block) => block.text).join('');

await check('messages', 'answer', async () => {
  const answer = await client.messages.create({ ...common, messages: asked });
  expect(KEY, words(answer));
  ensure(answer.stop_reason === 'end_turn', answer.stop_reason);
}, WORDS);

await check('messages', 'stream', async () => {
  const stream = client.messages.stream({ ...common, messages: asked });
  let text = '';
  stream.on('text', (piece) => { text += piece; });
  const whole = await stream.finalMessage();
  expect(KEY, text);
  ensure(whole.usage.output_tokens > 0, JSON.stringify(whole.usage));
}, WORDS);

for (const streamed of [false, true]) {
  await check('messages', streamed ? 'tool loop, streamed' : 'tool loop', async () => {
    const task = new Task();
    const messages = [{ role: 'user', content: task.prompt }];
    let answer;
    for (;;) {
      const body = { ...common, messages, tools };
      answer = streamed ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
      messages.push({ role: 'assistant', content: answer.content });
      const calls = answer.content.filter((block) => block.type === 'tool_use');
      if (!calls.length) break;
      messages.push({
        role: 'user',
        content: calls.map((call) => ({
          type: 'tool_result', tool_use_id: call.id, content: task.run(call.name, call.input),
        })),
      });
    }
    task.finish(words(answer));
  });
}

await check('messages', 'tool runner', async () => {
  const task = new Task();
  const made = TOOLS.map(({ name, description, schema }) => betaZodTool({
    name,
    description,
    inputSchema: z.object(Object.fromEntries(schema.required.map((member) => [member, z.string()]))),
    run: (input) => task.run(name, input),
  }));
  const messages = [{ role: 'user', content: task.prompt }];
  task.finish(words(await client.beta.messages.toolRunner({ ...common, messages, tools: made })));
});

await check('messages', 'structured output', async () => {
  const made = await client.messages.parse({
    ...common, max_tokens: 256, messages: asked, output_config: { format: zodOutputFormat(Key) },
  });
  ensure(made.parsed_output.number === Number(KEY), JSON.stringify(made.content));
});

await check('messages', 'thinking', async () => {
  const answer = await client.messages.create({
    ...common, messages: asked, thinking: { type: 'enabled', budget_tokens: 1024 },
  });
  ensure(answer.content[0].type === 'thinking', JSON.stringify(answer.content));
  const messages = [...asked, { role: 'assistant', content: answer.content }, { role: 'user', content: FIRST }];
  expect(KEY, words(await client.messages.create({ ...common, messages })));
});

await check('messages', 'second turn', async () => {
  const first = await client.messages.create({ ...common, messages: asked });
  const messages = [...asked, { role: 'assistant', content: first.content }, { role: 'user', content: FIRST }];
  expect(KEY, words(await client.messages.create({ ...common, messages })));
});

await check('messages', 'count tokens', async () => {
  const counted = await client.messages.countTokens({ model: MODEL, messages: asked, tools });
  ensure(counted.input_tokens > 10, JSON.stringify(counted));
});

await check('messages', 'errors', async () => {
  await rejects(['NotFoundError'], 'not_found_error', () =>
    client.messages.create({ ...common, model: 'claude-none', messages: asked }));
  await rejects(['BadRequestError'], 'invalid_request_error', () =>
    client.messages.create({ ...common, messages: asked, temperature: 9 }));
});
process.exit(0);

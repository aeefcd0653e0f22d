// The official OpenAI package for Node.
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ASK, BOTH, FIRST, FORCED_TOOLS, ForcedTask, KEY, MODEL, QUESTION, SMOLLM2, TOOLS, Task, URL, check, ensure, expect,
  rejects,
} from './checks.mjs';

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0 });
const asked = [{ role: 'user', content: QUESTION }];
const Key = z.object({ kind: z.literal('pass key'), number: z.number().int() });
const ofChat = ({ name, description, schema }) => ({
  type: 'function',
  function: { name, description, parameters: schema, strict: true },
});
const ofResponses = ({ name, description, schema }) => ({
  type: 'function', name, description, parameters: schema, strict: true,
});
const chatTools = TOOLS.map(ofChat);
const responseTools = TOOLS.map(ofResponses);

await check('chat', 'answer', async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: asked });
  expect(KEY, answer.choices[0].message.content);
}, BOTH);

await check('chat', 'stream', async () => {
  let text = '';
  const stream = await client.chat.completions.create({ model: MODEL, messages: asked, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? '';
  expect(KEY, text);
}, BOTH);

await check('chat', 'stream helper', async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: asked });
  expect(KEY, await stream.finalContent());
});

for (const stream of [false, true]) {
  await check('chat', stream ? 'tool loop, streamed' : 'tool loop', async () => {
    const task = new Task();
    const tools = TOOLS.map(({ name, description, schema }) => ({
      type: 'function',
      function: { name, description, parameters: schema, parse: JSON.parse, function: (input) => task.run(name, input) },
    }));
    const messages = [{ role: 'user', content: task.prompt }];
    const runner = client.chat.completions.runTools({ model: MODEL, messages, tools, stream });
    task.finish(await runner.finalContent());
  });
}

await check('chat', 'tool loop, calls forced', async () => {
  const task = new ForcedTask();
  const messages = [{ role: 'user', content: task.prompt }];
  for (const tool of FORCED_TOOLS) {
    const { message } = (await client.chat.completions.create({
      model: MODEL,
      messages,
      tools: [ofChat(tool)],
      tool_choice: tool.name === 'read_file' ? { type: 'function', function: { name: tool.name } } : 'required',
      parallel_tool_calls: false,
    })).choices[0];
    messages.push(message);
    for (const call of message.tool_calls) {
      const content = task.run(call.function.name, JSON.parse(call.function.arguments));
      messages.push({ role: 'tool', tool_call_id: call.id, content });
    }
  }
  messages.push({ role: 'user', content: ASK });
  task.finish((await client.chat.completions.create({ model: MODEL, messages, max_tokens: 24 })).choices[0].message.content);
}, [SMOLLM2]);

await check('chat', 'structured output', async () => {
  const made = await client.chat.completions.parse({
    model: MODEL, messages: asked, response_format: zodResponseFormat(Key, 'key'),
  });
  ensure(made.choices[0].message.parsed.number === Number(KEY), JSON.stringify(made.choices[0].message));
}, BOTH);

await check('chat', 'second turn after `parse`', async () => {
  const made = await client.chat.completions.parse({
    model: MODEL, messages: asked, response_format: zodResponseFormat(Key, 'key'),
  });
  const messages = [...asked, made.choices[0].message, { role: 'user', content: FIRST }];
  expect(KEY, (await client.chat.completions.create({ model: MODEL, messages })).choices[0].message.content);
});

await check('chat', 'second turn after tools', async () => {
  const task = new Task();
  const messages = [{ role: 'user', content: task.prompt }];
  for (;;) {
    const { message } = (await client.chat.completions.create({ model: MODEL, messages, tools: chatTools })).choices[0];
    messages.push(message);
    if (!message.tool_calls) break;
    for (const call of message.tool_calls) {
      const content = task.run(call.function.name, JSON.parse(call.function.arguments));
      messages.push({ role: 'tool', tool_call_id: call.id, content });
    }
  }
  messages.push({ role: 'user', content: FIRST });
  const again = await client.chat.completions.create({ model: MODEL, messages, tools: chatTools });
  expect('Read the file', again.choices[0].message.content);
});

await check('chat', 'errors', async () => {
  await rejects(['NotFoundError'], 'gpt-4o', () =>
    client.chat.completions.create({ model: 'gpt-4o', messages: asked }));
  await rejects(['BadRequestError'], 'temperature', () =>
    client.chat.completions.create({ model: MODEL, messages: asked, temperature: 9 }));
});

await check('responses', 'answer', async () => {
  expect(KEY, (await client.responses.create({ model: MODEL, input: QUESTION })).output_text);
}, BOTH);

await check('responses', 'stream helper', async () => {
  const stream = client.responses.stream({ model: MODEL, input: QUESTION });
  for await (const _ of stream);
  expect(KEY, (await stream.finalResponse()).output_text);
}, BOTH);

for (const streamed of [false, true]) {
  await check('responses', streamed ? 'tool loop, streamed' : 'tool loop', async () => {
    const task = new Task();
    const input = [{ role: 'user', content: task.prompt }];
    let answer;
    for (;;) {
      const body = { model: MODEL, input, tools: responseTools };
      if (streamed) {
        const stream = client.responses.stream(body);
        for await (const _ of stream);
        answer = await stream.finalResponse();
      } else answer = await client.responses.create(body);
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === 'function_call');
      if (!calls.length) break;
      for (const call of calls) {
        const output = task.run(call.name, JSON.parse(call.arguments));
        input.push({ type: 'function_call_output', call_id: call.call_id, output });
      }
    }
    task.finish(answer.output_text);
  });
}

await check('responses', 'tool loop, calls forced', async () => {
  const task = new ForcedTask();
  const input = [{ role: 'user', content: task.prompt }];
  for (const tool of FORCED_TOOLS) {
    const answer = await client.responses.create({
      model: MODEL,
      input,
      tools: [ofResponses(tool)],
      tool_choice: tool.name === 'read_file' ? { type: 'function', name: tool.name } : 'required',
      parallel_tool_calls: false,
    });
    input.push(...answer.output);
    for (const call of answer.output.filter((item) => item.type === 'function_call')) {
      const output = task.run(call.name, JSON.parse(call.arguments));
      input.push({ type: 'function_call_output', call_id: call.call_id, output });
    }
  }
  input.push({ role: 'user', content: ASK });
  task.finish((await client.responses.create({ model: MODEL, input, max_output_tokens: 24 })).output_text);
}, [SMOLLM2]);

await check('responses', 'structured output', async () => {
  const made = await client.responses.parse({ model: MODEL, input: QUESTION, text: { format: zodTextFormat(Key, 'key') } });
  ensure(made.output_parsed.number === Number(KEY), made.output_text);
}, BOTH);

await check('responses', 'second turn', async () => {
  const first = await client.responses.create({ model: MODEL, input: QUESTION });
  const input = [...asked, ...first.output, { role: 'user', content: FIRST }];
  expect(KEY, (await client.responses.create({ model: MODEL, input })).output_text);
});

await check('responses', 'second turn by `previous_response_id`', async () => {
  const first = await client.responses.create({ model: MODEL, input: QUESTION });
  expect(KEY, (await client.responses.create({ model: MODEL, input: FIRST, previous_response_id: first.id })).output_text);
});

await check('responses', 'errors', async () => {
  await rejects(['NotFoundError'], 'gpt-4o', () => client.responses.create({ model: 'gpt-4o', input: QUESTION }));
});
process.exit(0);

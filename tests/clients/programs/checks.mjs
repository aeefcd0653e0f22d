// What the Node programs of this folder share; `checks.py` is the same for Python's.
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

export const [URL, MODEL, SERVER] = process.argv.slice(2, 5);
export const [SCRIPTED, SMOLLM2, EMBEDDED] = ['scripted', 'smollm2', 'embedded'];
export const BOTH = [SCRIPTED, SMOLLM2];
export const WORDS = [SCRIPTED, EMBEDDED];
const number = () => String(10_000 + Math.floor(Math.random() * 90_000));
export const KEY = number();
export const QUESTION = `The pass key is ${KEY}. What is the pass key?`;
export const FIRST = 'What did I ask first?';
const SECONDS = 180;

export async function check(protocol, name, run, on = [SCRIPTED]) {
  if (!on.includes(SERVER)) return;
  let trouble = '';
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no end after ${SECONDS} s`)), SECONDS * 1000);
  });
  try {
    await Promise.race([run(), late]);
  } catch (error) {
    console.error(error);
    trouble = `${error.name}: ${error.message} ${error.responseBody ?? ''}`.trim();
  }
  clearTimeout(timer);
  console.log(JSON.stringify({ protocol, check: name, ok: !trouble, note: trouble.slice(0, 600) }));
}

export function expect(wanted, text) {
  if (!String(text).includes(wanted)) throw new Error(`"${wanted}" is not in ${String(text).slice(0, 300)}`);
}

export function ensure(condition, message) {
  if (!condition) throw new Error(message);
}

export async function rejects(names, word, run) {
  try {
    await run();
  } catch (error) {
    const all = [error.name, error.constructor.name];
    if (!names.some((name) => all.includes(name))) throw new Error(`${all} is none of ${names}: ${error.message}`);
    expect(word, `${error.message} ${error.responseBody ?? ''}`);
    return;
  }
  throw new Error('no error was raised');
}

// The work of a tool loop: a file of its own, whose pass key only a model that has read it can know.
export class Task {
  constructor() {
    this.path = join(mkdtempSync(join(tmpdir(), 'longreach-client-')), 'notes.txt');
    this.key = number();
    writeFileSync(this.path, `The lantern hangs by the door.\nThe pass key is ${this.key}.\n`);
    this.prompt = `Read the file ${this.path}, replace the word lantern with torch in it, and tell me the pass key in it.`;
  }

  run(name, input) {
    if (name === 'read_file') return readFileSync(input.path, 'utf8');
    if (name !== 'edit_file') throw new Error(`there is no tool ${name}`);
    const before = readFileSync(input.path, 'utf8');
    ensure(before.includes(input.old_text), `${input.old_text} is not in the file`);
    writeFileSync(input.path, before.replace(input.old_text, input.new_text));
    return 'The file is changed.';
  }

  finish(answer) {
    ensure(readFileSync(this.path, 'utf8').includes('torch'), `the file is not changed; the answer: ${answer}`);
    expect(this.key, answer);
  }
}

// The same work for a small model: its calls are forced, and each argument can be one thing only.
export class ForcedTask extends Task {
  constructor() {
    super();
    this.prompt = 'Read the file notes.txt, replace the word lantern with torch in it, and tell me its pass key.';
  }

  run(name, input) {
    const { schema } = FORCED_TOOLS.find((tool) => tool.name === name);
    for (const [member, { enum: values }] of Object.entries(schema.properties)) {
      ensure(values[0] === input[member], JSON.stringify(input));
    }
    return super.run(name, { ...input, path: this.path });
  }
}
export const ASK = 'What is the pass key?';

const only = (values) => ({
  type: 'object',
  properties: Object.fromEntries(Object.entries(values).map(([name, value]) => [name, { type: 'string', enum: [value] }])),
  required: Object.keys(values),
  additionalProperties: false,
});
export const FORCED_TOOLS = [
  { name: 'read_file', description: 'Read a file.', schema: only({ path: 'notes.txt' }) },
  {
    name: 'edit_file',
    description: 'Replace a text in a file.',
    schema: only({ path: 'notes.txt', old_text: 'lantern', new_text: 'torch' }),
  },
];

const members = (...names) => ({
  type: 'object',
  properties: Object.fromEntries(names.map((name) => [name, { type: 'string' }])),
  required: names,
  additionalProperties: false,
});
export const TOOLS = [
  { name: 'read_file', description: 'Read a file.', schema: members('path') },
  { name: 'edit_file', description: 'Replace a text in a file.', schema: members('path', 'old_text', 'new_text') },
];

/** The question on the page as a command and as a program. A long document stays in its file. */

const INLINE_CHARACTERS = 2000;

/** A shell command that sends the request; long documents are read from `file` by jq. */
export function asCurl({ url, path, body, text, file, needsKey }) {
  const head = [`curl -N ${shellQuoted(`${url}${path}`)}`, "-H 'Content-Type: application/json'"];
  if (needsKey) head.push('-H "Authorization: Bearer $LONGREACH_API_KEY"');
  if (text.length <= INLINE_CHARACTERS) return `${[...head, `-d ${shellQuoted(JSON.stringify(body))}`].join(" \\\n  ")}\n`;
  const program = jqOf(body, text);
  return `jq -n --rawfile text ${shellQuoted(file)} ${shellQuoted(program)} |\n${[...head, "-d @-"].join(" \\\n  ")}\n`;
}

/** A program with the `openai` client that prints the answer. Fields that are not OpenAI's go into `extra_body`. */
export function asPython({ url, path, body, text, file, needsKey }) {
  const { return_progress: progress, return_places: places, attention, document, stream_options: options, ...own } = body;
  const extra = attention || document ? { ...(document ? { document } : {}), ...(attention ? { attention } : {}) } : null;
  const isChat = path.includes("chat");
  const isLong = text.length > INLINE_CHARACTERS;
  const fields = Object.entries(own).map(([name, value]) => `    ${name}=${isLong ? pythonAround(value, text) : python(value)},`);
  if (extra) fields.push(`    extra_body=${python(extra)},`);
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${url}v1`)}, api_key=${needsKey ? 'os.environ["LONGREACH_API_KEY"]' : '"none"'})`,
    ...(isLong ? [`text = open(${python(file)}, encoding="utf-8").read()`] : []),
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...fields,
    ")",
    "for chunk in stream:",
    `    print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
    "print()",
    "",
  ].join("\n");
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A jq program that makes `value`, with the variable $text where a string has the document in it. */
function jqOf(value, text) {
  if (typeof value === "string" && value.includes(text)) {
    const [before, after] = parted(value, text);
    return `(${[before && JSON.stringify(before), "$text", after && JSON.stringify(after)].filter(Boolean).join(" + ")})`;
  }
  if (Array.isArray(value)) return `[${value.map((item) => jqOf(item, text)).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${jqOf(item, text)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** A Python expression for `value`, with the variable `text` where a string has the document in it. */
function pythonAround(value, text) {
  if (typeof value === "string" && value.includes(text)) {
    const [before, after] = parted(value, text);
    return [before && python(before), "text", after && python(after)].filter(Boolean).join(" + ");
  }
  if (Array.isArray(value)) return `[${value.map((item) => pythonAround(item, text)).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${python(name)}: ${pythonAround(item, text)}`).join(", ")}}`;
  }
  return python(value);
}

const python = (value) => {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "object") return pythonAround(value, "\u0000");
  return JSON.stringify(value); // strings and numbers are written alike
};

function parted(value, text) {
  const at = value.indexOf(text);
  return [value.slice(0, at), value.slice(at + text.length)];
}

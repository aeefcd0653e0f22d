/** Requests: a document, a question and options become a path and a body. */

/**
 * The request that puts `question` to `model` after `text`. The document always comes before the question, so that the next question about
 * it finds it in the prefix cache. `document` is the id of one that the server keeps, in place of `text`. `turns` are earlier questions
 * and answers, oldest first; `attention` a policy or null. `message` is the number of the message that has the text.
 */
export function requestFor({ model, text, document = null, question, turns = [], options, attention = null }) {
  const { system = "", stop = [], temperature = null, topP = null } = options;
  const shared = {
    model,
    ...(temperature === null ? {} : { temperature }),
    ...(topP === null ? {} : { top_p: topP }),
    ...(stop.length ? { stop } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
    ...(options.places ? { return_places: true } : {}),
    ...(document ? { document } : {}),
    ...(attention ? { attention } : {}),
  };
  if (options.form === "plain") {
    const prompt = `${text}${text || document ? "\n" : ""}${question}\nAnswer:`;
    return { path: "v1/completions", body: { ...shared, prompt, max_tokens: options.maxTokens }, message: 0 };
  }
  const questions = [...turns.map((turn) => turn.question), question];
  const messages = questions.flatMap((asked, i) => {
    const content = i === 0 && text ? `${text}\n\n${asked}` : asked;
    const user = { role: "user", content };
    return i < turns.length ? [user, { role: "assistant", content: turns[i].answer }] : [user];
  });
  if (system) messages.unshift({ role: "system", content: system });
  const body = { ...shared, messages, max_completion_tokens: options.maxTokens };
  return { path: "v1/chat/completions", body, message: system ? 1 : 0 };
}

/** The text and the reasoning that a chunk of either endpoint adds. */
export function pieceOf(chunk) {
  const choice = chunk.choices?.[0];
  return { text: choice?.text ?? choice?.delta?.content ?? "", reasoning: choice?.delta?.reasoning_content ?? "" };
}

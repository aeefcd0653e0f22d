/** Attention policies in words for people; what this page does not know, it takes from the server. */

const SENTENCES = {
  dense: "Every token reads all tokens before it: nothing is left out.",
  window: "Every token reads the last tokens and the first few; what lies between is not seen.",
  a_shape: "Every token reads the last tokens and many of the first ones.",
  strided: "Every token reads the last tokens, and one block in so many before them.",
  local_global: "Every token reads its own part of the text and the beginning.",
  bigbird: "Every token reads the last tokens, the first ones, and some drawn at random.",
  vertical_slash: "Every token reads fixed places of the text, and those at fixed distances.",
  dynamic: "The server estimates which parts of the text matter, and reads those.",
};

// Parameters of which a request has one at most.
const TARGETS = { dynamic: ["recall", "density", "speedup"] };

/** One sentence about a policy. */
export const sentenceOf = ({ policy, description }) => SENTENCES[policy] ?? plain(description).split(/(?<=\.) /)[0];

/** All that the server says about it. */
export const plain = (description) => description.replaceAll("`", "").replace(/\s+/g, " ");

/** The names of the parameters that exclude one another. */
export const targetsOf = ({ policy, parameters }) => (TARGETS[policy] ?? []).filter((name) => name in parameters);

/** A policy's name as people say it. */
export const nameOf = (policy) => (policy === "dense" ? "exact" : policy.replaceAll("_", " "));

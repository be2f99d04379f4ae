// JSON schemas of openapi.json: the words for a type, and an example of a body.
// @ts-check

/** A schema behind its reference. @param {any} schema @param {any} schemas @returns {{name: string, type: any}} */
export function resolved(schema, schemas) {
  const name = schema && schema.$ref ? schema.$ref.split("/").pop() : "";
  return { name, type: name ? schemas[name] || {} : schema || {} };
}

/** A type in words. @param {any} schema @returns {string} */
export function kindOf(schema) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split(/[/.]/).pop(); // a name that several types have begins with its module
  if (schema.anyOf) return schema.anyOf.map(kindOf).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.type === "array") return schema.items ? `[${kindOf(schema.items)}]` : "list";
  const limits = [
    schema.minimum !== undefined && "≥ " + schema.minimum, schema.exclusiveMinimum !== undefined && "> " + schema.exclusiveMinimum, schema.maximum !== undefined && "≤ " + schema.maximum,
  ].filter((one) => one);
  return (schema.type || "any") + (limits.length ? ` (${limits.join(", ")})` : "");
}

/** Bodies that do something at once. The key is the end of a path. @type {Record<string, (model: string) => any>} */
const BODIES = {
  "/v1/chat/completions": (model) => ({ model, messages: [{ role: "user", content: "Hello" }], max_tokens: 64, stream: true }),
  "/v1/completions": (model) => ({ model, prompt: "Once upon a time", max_tokens: 32 }),
  "/tokenize": (model) => ({ model, prompt: "Hello" }),
  "/detokenize": (model) => ({ model, tokens: [1, 2, 3] }),
  "/v1/embeddings": (model) => ({ model, input: ["A text"] }),
  "/v2/embed": (model) => ({ model, texts: ["A text"], input_type: "search_document", embedding_types: ["float"] }),
  "/embed": () => ({ inputs: ["A text"] }),
  "/predict": () => ({ inputs: "A text" }),
  "/rerank": (model) => ({ model, query: "When do you open?", documents: ["We open at nine.", "Cats sleep."] }),
  "/score": (model) => ({ model, text_1: "When do you open?", text_2: ["We open at nine.", "Cats sleep."] }),
  "/classify": (model) => ({ model, input: ["When do you open?"] }),
  "/pooling": (model) => ({ model, input: ["A text"] }),
  "/infer": () => ({ inputs: [{ name: "text", datatype: "BYTES", shape: [1], data: ["When do you open?"] }] }),
  "/generate": () => ({ text_input: "Once upon a time", parameters: { max_tokens: 32 } }),
  "/generate_stream": () => ({ text_input: "Once upon a time", parameters: { max_tokens: 32 } }),
  ":predict": () => ({ instances: ["When do you open?"] }),
  "/invocations": () => ({ inputs: ["When do you open?"] }),
  "/admin/keys": () => ({ tenant: "team-a", name: "try-out", scopes: ["infer", "models"], expires_in_s: 3600 }),
};

/** A body for a path: a known one, else the needed fields of its schema. @param {string} path @param {any} schema @param {any} schemas @param {string} model */
export function example(path, schema, schemas, model) {
  const known = Object.keys(BODIES).filter((end) => path === end || (path.endsWith(end) && !(path in BODIES))).sort((one, other) => other.length - one.length)[0];
  return known ? BODIES[known](model) : valueOf(schema, schemas, model, 0);
}

/** @returns {any} the smallest value of a schema that has every needed field */
function valueOf(schema, schemas, model, depth, field = "") {
  const { type } = resolved(schema, schemas);
  if (field === "model") return model;
  if (depth > 5) return null;
  if (type.default !== undefined && type.default !== null) return type.default;
  if (type.enum) return type.enum[0];
  if (type.anyOf) return valueOf(type.anyOf[0], schemas, model, depth + 1, field);
  if (type.type === "array") return type.items ? [valueOf(type.items, schemas, model, depth + 1)] : [];
  if (type.type === "integer" || type.type === "number") return type.minimum ?? 1;
  if (type.type === "boolean") return false;
  if (type.type === "string") return "text";
  const body = {};
  for (const name of type.required || []) body[name] = valueOf((type.properties || {})[name], schemas, model, depth + 1, name);
  return body;
}

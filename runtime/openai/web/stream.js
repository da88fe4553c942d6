/* The server: what it serves, and one request as a stream of events. */

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The headers of every request. */
function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** fetch, whose failures are told in words. */
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new ServerError(await words(response), response.status);
  return response;
}

/** The text of an error response, whether it is in OpenAI's shape or not. */
async function words(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}. ${text.slice(0, 300)}`;
  }
}

/** The first model that the server lists. */
async function model(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

/** Sends a request and yields the parsed chunks of its answer until [DONE]. */
async function* chunks(path, body, key, signal) {
  const response = await ask(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("The answer broke off: the server closed the connection.");
}

/** The data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The answer broke off: the connection was lost.");
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

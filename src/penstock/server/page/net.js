// Calls to the server: the API key, errors in words, and server-sent events over fetch (EventSource cannot send a key).

let secret = sessionStorage.getItem("key") || localStorage.getItem("key") || "";
let asking = null;

/** Asks for an API key; true if one was given. One dialog at a time. */
export function askKey() {
  const dialog = document.getElementById("keys"), field = document.getElementById("secret");
  asking ??= new Promise(resolve => {
    field.value = "";
    dialog.showModal();
    dialog.onclose = () => {
      asking = null;
      if (dialog.returnValue !== "ok") return resolve(false);
      secret = field.value.trim();
      field.value = "";
      sessionStorage.setItem("key", secret);
      if (document.getElementById("remember").checked) localStorage.setItem("key", secret);
      else localStorage.removeItem("key");
      resolve(true);
    };
  });
  return asking;
}

async function reason(answer) {
  try {
    const { error } = await answer.json();
    return error.message || String(error);
  } catch {
    return `status ${answer.status}`;
  }
}

/** A response whose status is good. Throws an Error with the server's own words; asks for a key where one is needed. */
export async function call(path, body, signal) {
  for (;;) {
    const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    if (answer.ok) return answer;
    const words = await reason(answer);
    if (answer.status !== 401 || !await askKey()) throw Object.assign(new Error(words), { status: answer.status });
  }
}

/** Yields the data of each server-sent event, decoded, until the stream ends. */
export async function* events(path, body, signal) {
  const reader = (await call(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5)).join("\n").trim();
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** An element with properties and children; `class`, `data-*` and `aria-*` become attributes. */
export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

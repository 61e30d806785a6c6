"use strict";

const find = (id) => document.getElementById(id);
const AUTO = "", PLAIN = "plain", EXPECTED = "expected";
const NAMES = { [AUTO]: "what pays", [PLAIN]: "plain decoding", [EXPECTED]: "an expected answer" };
const ROOM = 0.75; // how full the context may be before a conversation's first turns are left out

let key = ""; // in this page's memory alone
let aborter = null;
let model = null; // what the server says of it
let turns = []; // of a conversation: question, answer, element
let unread = 0; // how many of the first turns are not sent any more
let editing = null; // the number of the turn that the prompt replaces
let used = 0; // tokens of the context that the last turn took
const gains = {}; // tokens, steps and seconds by method

const chatting = () => find("mode").value === "chat";

/** Calls the server; throws an Error with its message, status and code if it refuses. */
async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body), signal: aborter.signal } : {};
  const answer = await reached(fetch(path, { ...options, headers }));
  if (answer.ok) return answer;
  const told = (await answer.json().catch(() => null))?.error;
  const error = new Error(told?.message ?? `the server answered ${answer.status}`);
  throw Object.assign(error, { status: answer.status, code: told?.code });
}

/** What a promise of the network's gives; a browser's own words for a server that is gone say little. */
function reached(promise) {
  return promise.catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached; check that it runs, and send it again");
  });
}

/** The objects of a stream of server-sent events, up to [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Error("the server ended the stream too early");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** The conversation up to a question. */
function messages(question) {
  const said = turns.slice(unread).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  const system = find("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: question }];
}

/** How a request speculates. */
function speculative(method) {
  const drafts = method === PLAIN ? 0 : find("drafts").valueAsNumber;
  const keys = { ...(method && method !== PLAIN && { method }), ...(!Number.isNaN(drafts) && { num_speculative_tokens: drafts }) };
  if (method === EXPECTED) return { prediction: { type: "content", content: find("expected").value } };
  return Object.keys(keys).length ? { speculative: keys } : {};
}

/** Decodes a prompt, or the answer to a question, into a pane. */
async function decode(pane, method, prompt) {
  const numbers = { max_tokens: "max-tokens", temperature: "temperature", top_p: "top-p", seed: "seed" };
  const said = Object.entries(numbers).filter(([, id]) => find(id).value !== "").map(([name, id]) => [name, find(id).valueAsNumber]);
  const body = {
    ...(chatting() ? { messages: messages(prompt) } : { prompt }),
    ...Object.fromEntries(said),
    ...speculative(method),
    stream: true,
    stream_options: { continuous_usage_stats: true },
    include_speculation: true,
    include_steps: true,
  };
  const answer = await call(chatting() ? "v1/chat/completions" : "v1/completions", body);
  for await (const event of events(answer)) pane.add(event);
  pane.render();
  const gain = (gains[method] ??= { tokens: 0, steps: 0, seconds: 0 });
  gain.tokens += pane.usage.completion_tokens - pane.counted;
  gain.steps += pane.steps - 1; // the first step's tokens are not counted either
  gain.seconds += pane.last - pane.first;
  showGains();
}

/** As decode; a conversation that has outgrown the context loses its first turns, which is said. */
async function fitted(pane, method, prompt) {
  for (;;) {
    try {
      return await decode(pane, method, prompt);
    } catch (error) {
      if (!chatting() || error.code !== "context_length_exceeded" || unread === turns.length) throw error;
      leaveOut();
    }
  }
}

/** Leaves out half of the turns that are read. */
function leaveOut() {
  unread += Math.ceil((turns.length - unread) / 2);
  find("outgrown")?.remove();
  const note = document.createElement("p");
  note.id = "outgrown";
  note.className = "hint";
  note.textContent = `The conversation has outgrown the context: the model no longer reads what is above this line.`;
  (turns[unread]?.root ?? turns.at(-1).root.nextSibling)?.before(note);
}

/** A turn's element. */
function shownTurn(question) {
  const root = find("turn").content.cloneNode(true).firstElementChild;
  root.querySelector(".said").textContent = question;
  root.querySelector(".copy").addEventListener("click", (event) => copy(question, event.target));
  root.querySelector(".edit").addEventListener("click", () => edit(turns.findIndex((turn) => turn.root === root)));
  find("turns").append(root);
  return root;
}

/** Takes turns back from a number on, and gives them. */
function takeBack(from) {
  const taken = turns.splice(from);
  taken.forEach((turn) => turn.root.remove());
  if (unread > turns.length || !turns.length) {
    unread = Math.min(unread, turns.length);
    find("outgrown")?.remove();
  }
  used = turns.at(-1)?.used ?? 0;
  return taken;
}

function edit(number) {
  if (aborter || number < 0) return;
  find("expected").value = turns[number].answer;
  startEditing(number, turns[number].question);
  find("prompt").focus();
}

function startEditing(number, question) {
  editing = number;
  find("prompt").value = question;
  find("asking").textContent = `Message ${number + 1}, edited: what follows it is answered anew; Esc leaves it as it was`;
}

function stopEditing() {
  editing = null;
  find("asking").textContent = chatting() ? "Message" : "Prompt";
}

/** Answers the form's prompt, or a question, as the turn of a number. */
async function run(question = null, number = null) {
  if (aborter) return;
  const typed = question === null, edited = typed ? editing : null;
  if (typed) {
    if (!find("form").reportValidity()) return;
    question = find("prompt").value;
    number = chatting() ? editing ?? turns.length : 0;
  }
  aborter = new AbortController();
  find("run").disabled = true;
  find("stop").disabled = false;
  find("error").hidden = true;
  find("status").textContent = "Running.";
  const chat = chatting(), method = find("method").value, beside = find("beside").checked && method !== PLAIN;
  const taken = takeBack(number);
  if (!chat) find("turns").replaceChildren();
  if (chat && model && used > ROOM * model.max_model_len && unread < turns.length) leaveOut();
  const root = shownTurn(question), panes = root.querySelector(".panes");
  if (chat) {
    find("prompt").value = "";
    document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight; // the answer's pane follows from there
  }
  stopEditing();
  const fast = new Pane(method === PLAIN ? "Plain" : method ? `Speculative: ${NAMES[method] ?? method}` : "Speculative", panes);
  root.querySelector(".retry").addEventListener("click", () => {
    const at = turns.findIndex((turn) => turn.root === root);
    find("expected").value ||= fast.text;
    if (chat ? at >= 0 : true) run(question, chat ? at : 0);
  });
  panes.classList.toggle("several", beside);
  const plain = beside ? new Pane("Plain", panes) : null;
  plain?.root.querySelector(".retry").remove();
  let said = "";
  try {
    await fitted(fast, method, question);
    const tokens = fast.usage.completion_tokens;
    said = `Done: ${tokens} tokens in ${fast.steps} steps.`;
    used = fast.usage.total_tokens;
    if (fast.ended === "length" && model && used >= model.max_model_len) said += " The context is full.";
    if (plain) await decode(plain, PLAIN, question); // after the other, so that each has the machine to itself
    if (plain?.speed) {
      const same = fast.text === plain.text ? "The texts are the same." : "The texts differ.";
      said += ` ${(fast.speed / plain.speed).toFixed(2)} times plain decoding's speed. ${same}`;
    }
  } catch (error) {
    const stopped = aborter.signal.aborted;
    said = stopped ? "Stopped." : "";
    if (error.status === 401) askForKey(key ? "The server does not accept this key." : "The server asks for an API key.");
    else if (!stopped) show(error);
  }
  fast.render();
  plain?.render();
  if (chat && (fast.text || fast.ended)) turns.push({ question, answer: fast.text, root, used });
  else if (chat) {
    root.remove();
    turns.push(...taken);
    find("turns").append(...taken.map((turn) => turn.root));
    if (edited !== null) startEditing(edited, question);
    else if (typed) find("prompt").value = question;
  }
  find("status").textContent = said;
  if (!find("error").hidden) find("error").scrollIntoView({ block: "nearest" }); // below the form, on a phone out of sight
  aborter = null;
  find("run").disabled = false;
  find("stop").disabled = true;
}

function show(error) {
  find("error").textContent = error.message;
  find("error").hidden = false;
}

function askForKey(note) {
  find("key-form").hidden = false;
  find("key-note").textContent = note;
  find("key").focus();
}

/** What each method brought, in the list of methods. */
function showGains() {
  const plain = gains[PLAIN];
  for (const option of find("method").options) {
    const gain = gains[option.value], name = NAMES[option.value] ?? option.value;
    option.textContent = name;
    if (!gain?.seconds) continue;
    const speed = gain.tokens / gain.seconds;
    option.textContent += `: ${speed.toFixed(1)} tokens/s, ${(gain.tokens / gain.steps).toFixed(2)} a step`;
    if (plain?.seconds && gain !== plain) option.textContent += `, ${((speed * plain.seconds) / plain.tokens).toFixed(2)}x plain`;
  }
}

/** Makes the page one for conversations, or for text to continue. */
function setMode(chat) {
  find("mode").value = chat ? "chat" : "text";
  document.body.classList.toggle("chat", chat);
  document.body.classList.toggle("drafts", !chat || find("tokens").checked);
  find(chat ? "form" : "turns").before(find(chat ? "turns" : "form")); // below what was said, or above what follows
  find("settings").open = !chat;
  find("prompt").rows = chat ? 2 : 4;
  find("run").textContent = chat ? "Send" : "Run";
  find("keys").textContent = chat ? "Enter sends, Shift+Enter begins a line, Esc stops." : "Ctrl+Enter runs, Esc stops.";
  find("max-tokens").value = chat ? "" : "128";
  find("max-tokens").placeholder = chat ? "as fit" : "16";
  find("temperature").value = chat ? "" : "0";
  const expected = [...find("method").options].find((option) => option.value === EXPECTED);
  if (expected) expected.hidden = expected.disabled = !chat;
  if (find("method").selectedOptions[0]?.disabled) find("method").value = AUTO;
  find("expecting").hidden = find("method").value !== EXPECTED;
  takeBack(0);
  find("turns").replaceChildren();
  stopEditing();
}

/** Says what is served and offers what it can do, or asks for a key. */
async function greet() {
  try {
    [model] = (await (await call("v1/models")).json()).data;
    const names = [AUTO, PLAIN, ...model.methods.map(({ name }) => name), ...(model.predictions ? [EXPECTED] : [])];
    find("method").replaceChildren(...names.map((name) => new Option(NAMES[name] ?? name, name)));
    showGains();
    find("modes").hidden = !model.chat;
    setMode(model.chat);
    find("error").hidden = find("key-form").hidden = true;
    find("model").textContent = `${model.id}, context of ${model.max_model_len} tokens`;
  } catch (error) {
    if (error.status === 401) askForKey(key ? "The server does not accept this key." : "The server asks for an API key.");
    else show(error);
  }
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value;
  find("key").value = "";
  if (model) find("key-form").hidden = true;
  else greet();
});
find("stop").addEventListener("click", () => aborter?.abort());
find("reset").addEventListener("click", () => {
  if (aborter) return;
  takeBack(0);
  stopEditing();
  find("status").textContent = "";
  find("prompt").focus();
});
find("mode").addEventListener("change", () => setMode(chatting()));
find("method").addEventListener("change", () => (find("expecting").hidden = find("method").value !== EXPECTED));
find("tokens").addEventListener("change", (event) => document.body.classList.toggle("drafts", event.target.checked));
find("positions").addEventListener("change", (event) => document.body.classList.toggle("positions", event.target.checked));
find("settings").addEventListener("invalid", () => (find("settings").open = true), true); // to show what is wrong
find("tree").addEventListener("keydown", (event) => trees.pressed(event));
find("turns").addEventListener("click", (event) => {
  if (event.target.matches(".code > .copy")) copy(event.target.previousSibling.textContent, event.target);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && editing !== null && !aborter) {
    find("prompt").value = "";
    stopEditing();
  } else if (event.key === "Escape") aborter?.abort();
  if (event.key !== "Enter" || event.isComposing) return;
  // On a phone Enter begins a line, as there is no Shift+Enter.
  const sends = chatting() && event.target === find("prompt") && !event.shiftKey && !matchMedia("(pointer: coarse)").matches;
  if (sends || event.ctrlKey || event.metaKey) {
    event.preventDefault();
    run();
  }
});
document.body.classList.toggle("positions", find("positions").checked);
setMode(false);
greet();

"use strict";

const DEEPEST_COLOUR = 6;
const SVG = "http://www.w3.org/2000/svg";
const COLUMN = 128, ROW = 32, BOX = 104, LETTERS = 13; // pixels of a tree's columns, rows and boxes; letters in a box
const find = (id) => document.getElementById(id);

let key = ""; // in this page's memory alone
let aborter = null;

/** Calls the server; throws an Error with its message if it refuses. */
async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body), signal: aborter.signal } : {};
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  find("key-form").hidden = answer.status !== 401;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
}

/** The objects of a stream of server-sent events, up to [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
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

/** A column with an output and its figures. */
class Pane {
  constructor(title) {
    this.root = find("pane").content.cloneNode(true).firstElementChild;
    this.root.querySelector("h2").textContent = title;
    this.output = this.root.querySelector(".output");
    this.output.setAttribute("aria-label", `${title}: output`);
    this.output.addEventListener("keydown", (event) => this.move(event));
    find("panes").append(this.root);
    this.text = "";
    this.steps = 0;
    this.first = this.last = null; // when the first and the last step ended, in seconds
    this.counted = 0; // tokens of the first step, whose time is the prompt's
    this.usage = null;
  }

  get speed() {
    const seconds = this.last - this.first;
    return seconds > 0 ? (this.usage.completion_tokens - this.counted) / seconds : 0;
  }

  show(name, value) {
    this.root.querySelector(`.${name}`).textContent = value;
  }

  /** Adds what a chunk says. */
  add(event) {
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices) {
      this.last = choice.step?.seconds ?? this.last; // the server's clock: several steps may come at once
      this.text += choice.text ?? choice.delta?.content ?? "";
      if (choice.step?.tokens.length) this.addStep(choice.step);
      if (this.first === null) {
        this.first = this.last;
        this.counted = this.usage.completion_tokens;
      }
    }
    const spoken = this.usage.speculation;
    this.show("speed", this.speed ? this.speed.toFixed(1) : "–");
    this.show("length", spoken.acceptance_length.toFixed(2));
    const share = spoken.num_draft_tokens ? (100 * spoken.num_accepted_tokens) / spoken.num_draft_tokens : 0;
    this.show("accepted", spoken.num_draft_tokens ? `${share.toFixed(0)} %` : "none drafted");
    this.show("count", this.usage.completion_tokens);
  }

  addStep(step) {
    const number = (this.steps += 1);
    const span = document.createElement("span");
    span.className = "step";
    span.tabIndex = number === 1 ? 0 : -1; // one of the steps can be reached by Tab, the others by arrow keys
    for (const [text, position] of step.tokens) {
      if (!text) continue;
      const token = document.createElement("span");
      token.textContent = text;
      if (position) {
        token.className = `p${Math.min(position, DEEPEST_COLOUR)}`;
        token.dataset.position = position;
        token.title = `accepted draft token, position ${position}`;
      } else token.title = "the target's own token";
      span.append(token);
    }
    const said = `${this.root.querySelector("h2").textContent}, step ${number}: ${summary(step)}`;
    const choose = () => {
      document.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
      span.classList.add("chosen");
      find("caption").textContent = said;
      find("tree").replaceChildren(drawn(step));
      find("tree").setAttribute("aria-label", `Token tree of ${said}`);
    };
    span.addEventListener("pointerenter", choose);
    span.addEventListener("click", choose);
    span.addEventListener("focus", () => {
      choose();
      find("status").textContent = said;
    });
    this.output.append(span);
  }

  /** Arrow keys, Home and End go from step to step. */
  move(event) {
    const spans = [...this.output.children];
    const at = spans.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: spans.length - 1 };
    const next = spans[to[event.key]];
    if (at < 0 || !next) return;
    event.preventDefault();
    spans[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function summary(step) {
  const drafts = step.parents.length - 1;
  if (!drafts) return "nothing drafted, a token of the target's own";
  const words = step.tokens.map(([text, position]) => `${shown(text)} (${position ? `draft ${position}` : "own"})`);
  return `${drafts} draft tokens verified, ${step.path.length} accepted: ${words.join(" ")}`;
}

/** A token's text on one line, spaces visible. */
function shown(text) {
  const line = text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return line.length > LETTERS ? `${line.slice(0, LETTERS - 1)}…` : line;
}

function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** A step's tree from left to right, with the target's own token behind the last one accepted. */
function drawn(step) {
  const parents = [...step.parents];
  const labels = parents.map((_, node) => (node ? step.drafted[node - 1] : "the text"));
  const kept = new Set([0, ...step.path]);
  if (!step.drafted.length) step.path.forEach((node, at) => (labels[node] = step.tokens[at]?.[0])); // others are unknown
  const own = step.tokens[step.path.length]; // not there if the output ended before
  if (own) {
    kept.add(parents.length);
    parents.push(step.path.at(-1) ?? 0);
    labels.push(own[0]);
  }
  const children = parents.map(() => []);
  parents.forEach((up, node) => up >= 0 && children[up].push(node));
  const x = [], y = [];
  let rows = 0;
  const place = (node, depth) => {
    x[node] = COLUMN * depth + COLUMN / 2;
    children[node].forEach((below) => place(below, depth + 1));
    // A parent stands in the middle of its children.
    y[node] = children[node].length ? (y[children[node][0]] + y[children[node].at(-1)]) / 2 : ROW * rows++ + ROW / 2;
  };
  place(0, 0);
  const width = Math.max(...x) + COLUMN / 2, half = COLUMN / 2;
  const svg = element("svg", { width, height: rows * ROW, viewBox: `0 0 ${width} ${rows * ROW}`, "aria-hidden": "true" });
  parents.forEach((up, node) => {
    if (up < 0) return;
    const d = `M${x[up]} ${y[up]}c${half} 0 ${half} ${y[node] - y[up]} ${COLUMN} ${y[node] - y[up]}`;
    svg.append(element("path", { d, class: kept.has(node) ? "kept" : "" }));
  });
  parents.forEach((_, node) => {
    const depth = Math.round((x[node] - half) / COLUMN);
    const drafted = node && node < step.parents.length;
    const colour = drafted ? ` p${Math.min(depth, DEEPEST_COLOUR)}` : "";
    const label = element("text", { x: x[node], y: y[node] }, shown(labels[node] ?? "?"));
    const box = element("rect", { x: x[node] - BOX / 2, y: y[node] - 12, width: BOX, height: 24, rx: 6 });
    svg.append(element("g", { class: (kept.has(node) ? "kept" : "") + colour }, box, label));
  });
  return svg;
}

/** Decodes the form's prompt into a pane; no method is what pays, no number of drafts as many as pay. */
async function decode(pane, method, drafts) {
  const chat = find("mode").value === "chat";
  const prompt = find("prompt").value;
  const body = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: find("max-tokens").valueAsNumber,
    temperature: find("temperature").valueAsNumber,
    ...(find("seed").value && { seed: find("seed").valueAsNumber }),
    ...((method || drafts !== "") && {
      speculative: { ...(method && { method }), ...(drafts !== "" && { num_speculative_tokens: Number(drafts) }) },
    }),
    stream: true,
    stream_options: { continuous_usage_stats: true },
    include_speculation: true,
    include_steps: true,
  };
  const answer = await call(chat ? "v1/chat/completions" : "v1/completions", body);
  for await (const event of events(answer)) pane.add(event);
}

async function run() {
  if (aborter || !find("form").reportValidity()) return;
  aborter = new AbortController();
  find("run").disabled = true;
  find("stop").disabled = false;
  find("error").hidden = true;
  find("status").textContent = "Running.";
  find("panes").replaceChildren();
  const method = find("method").value;
  const fast = new Pane(method ? `Speculative: ${method}` : "Speculative");
  const plain = find("beside").checked ? new Pane("Plain") : null;
  try {
    await decode(fast, method, find("drafts").value);
    if (plain) await decode(plain, "", 0); // after the other, so that each has the machine to itself
    let said = `Done: ${fast.usage.completion_tokens} tokens in ${fast.steps} steps.`;
    if (plain?.speed) {
      const same = fast.text === plain.text ? "The texts are the same." : "The texts differ.";
      said += ` ${(fast.speed / plain.speed).toFixed(2)} times plain decoding's speed. ${same}`;
    }
    find("status").textContent = said;
  } catch (error) {
    const stopped = aborter.signal.aborted;
    find("status").textContent = stopped ? "Stopped." : "";
    if (!stopped) show(error);
  } finally {
    aborter = null;
    find("run").disabled = false;
    find("stop").disabled = true;
  }
}

function show(error) {
  find("error").textContent = error.message;
  find("error").hidden = false;
}

/** Whether a method can be chosen. */
function known(method) {
  return [...find("method").options].some(({ value }) => value === method);
}

/** Says what is served and offers its methods, or asks for a key. */
async function greet() {
  try {
    const models = (await (await call("v1/models")).json()).data;
    find("model").textContent = `${models[0].id}, context of ${models[0].max_model_len} tokens`;
    for (const { name } of models[0].methods.filter(({ name }) => !known(name))) find("method").append(new Option(name));
    find("error").hidden = find("key-form").hidden = true;
  } catch (error) {
    show(error);
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
  greet();
});
find("stop").addEventListener("click", () => aborter?.abort());
find("positions").addEventListener("change", (event) => {
  document.body.classList.toggle("positions", event.target.checked);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") aborter?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});
document.body.classList.toggle("positions", find("positions").checked);
greet();

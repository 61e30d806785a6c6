"use strict";

let pointer = []; // where it last entered a step

/** An output with its figures. */
class Pane {
  constructor(title, into) {
    this.root = find("pane").content.cloneNode(true).firstElementChild;
    this.title = title;
    this.root.querySelector("h2").textContent = title;
    this.output = this.root.querySelector(".output");
    this.output.setAttribute("aria-label", `${title}: output`);
    this.output.addEventListener("keydown", (event) => this.move(event));
    this.rendered = this.root.querySelector(".markdown");
    this.root.querySelector(".copy").addEventListener("click", (event) => copy(this.text, event.target));
    into.append(this.root);
    this.text = "";
    this.steps = 0;
    this.first = this.last = null; // when the first and the last step ended, in seconds
    this.counted = 0; // tokens of the first step, whose time is the prompt's
    this.usage = this.ended = null;
    this.frame = 0;
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
      this.ended = choice.finish_reason ?? this.ended;
      if (choice.step?.tokens.length) this.addStep(choice.step);
      if (this.first === null) {
        this.first = this.last;
        this.counted = choice.step?.tokens.length ?? 0; // the usage may count later steps already
      }
    }
    const spoken = this.usage.speculation;
    this.show("speed", this.speed ? this.speed.toFixed(1) : "–");
    this.show("length", spoken.acceptance_length.toFixed(2));
    const share = spoken.num_draft_tokens ? (100 * spoken.num_accepted_tokens) / spoken.num_draft_tokens : 0;
    this.show("accepted", spoken.num_draft_tokens ? `${share.toFixed(0)} %` : "none");
    this.show("count", this.usage.completion_tokens);
    this.frame ||= requestAnimationFrame(() => this.render());
  }

  /** Shows the text as Markdown, at most once a frame. */
  render() {
    this.frame = 0;
    const bottom = document.documentElement;
    const follows = bottom.scrollHeight - bottom.scrollTop - bottom.clientHeight < 80;
    this.rendered.replaceChildren(markdown(this.text));
    if (follows && document.body.classList.contains("chat")) bottom.scrollTop = bottom.scrollHeight;
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
    const said = `${this.title}, step ${number}: ${summary(step)}`;
    span.choose = () => {
      document.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
      span.classList.add("chosen");
      trees.show(step, said);
    };
    span.addEventListener("pointerenter", ({ screenX, screenY }) => {
      const rests = pointer[0] === screenX && pointer[1] === screenY; // the text moves, as it is scrolled
      pointer = [screenX, screenY];
      if (!rests) span.choose();
    });
    span.addEventListener("click", span.choose);
    span.addEventListener("focus", () => {
      span.choose();
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

/** Puts a text on the clipboard, and says so on the button. */
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not there without https, but on this machine
    const box = document.createElement("textarea");
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

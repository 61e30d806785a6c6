"use strict";

// Markdown as models write it, into elements: text is never read as HTML, so that nothing in it can run.

const DEEPEST = 16; // quotes and lists in each other; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+\|?\s*$|^\s*\|\s*:?-+:?\s*\|\s*$/;
const SPAN = new RegExp(
  [
    String.raw`\\([!-\/:-@[-\x60{-~])`, // 1: an escaped sign
    String.raw`(\x60+)(?!\x60)([^]*?[^\x60])\2(?!\x60)`, // 2, 3: code
    String.raw`!?\[([^\[\]]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)`, // 4, 5: a link
    String.raw`(https?:\/\/[^\s<>()]*[^\s<>().,:;!?"'*_])`, // 6: an address
    String.raw`(\*\*|__)(?=\S)([^]*?\S)\7(?![*_])`, // 7, 8: strong
    String.raw`(\*|(?<!\w)_)(?=[^\s*_])([^]*?[^\s*_])\9(?!\w)`, // 9, 10: emphasis
    String.raw`~~(?=\S)([^]*?\S)~~`, // 11: struck out
  ].join("|"),
  "g",
);

/** A text as elements. */
function markdown(text) {
  const made = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), made, 0);
  return made;
}

function added(into, name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  into.append(made);
  return made;
}

function blocks(lines, into, depth) {
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) at = code(lines, at, fence, into);
    else if (heading) {
      spans(heading[2], added(into, `h${Math.min(6, heading[1].length + 2)}`)); // below the page's own
      at += 1;
    } else if (RULE.test(line)) {
      added(into, "hr");
      at += 1;
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      const end = past(lines, at, (other) => QUOTE.test(other));
      blocks(lines.slice(at, end).map((other) => other.replace(QUOTE, "")), added(into, "blockquote"), depth + 1);
      at = end;
    } else if (depth < DEEPEST && ITEM.test(line)) at = list(lines, at, into, depth);
    else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "")) at = table(lines, at, into);
    else {
      const end = past(lines, at + 1, (other) => other.trim() && !begins(other, depth));
      spans(lines.slice(at, end).map((other) => other.trim()).join("\n"), added(into, "p"));
      at = end;
    }
  }
}

/** Whether a line ends the paragraph before it. */
function begins(line, depth) {
  return [FENCE, HEADING, RULE].some((kind) => kind.test(line)) || (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line)));
}

/** The first line from ``at`` on that is not like the others. */
function past(lines, at, like) {
  while (at < lines.length && like(lines[at])) at += 1;
  return at;
}

function code(lines, at, [, mark, language], into) {
  const closes = (line) => new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`).test(line);
  const end = past(lines, at + 1, (line) => !closes(line));
  const box = added(into, "div");
  box.className = "code";
  const shown = added(added(box, "pre"), "code", lines.slice(at + 1, end).join("\n"));
  if (language.trim()) shown.dataset.language = language.trim();
  const button = added(box, "button", "Copy");
  button.type = "button";
  button.className = "copy";
  return end + 1;
}

function list(lines, at, into, depth) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const made = added(into, ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(first, 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered || RULE.test(lines[at])) break;
    const inner = item[1].length + item[2].length + 1;
    let end = at + 1;
    while (end < lines.length) {
      const line = lines[end], inside = line.search(/\S/) > item[1].length;
      const goesOn = line.trim() ? inside || (lines[end - 1].trim() && !begins(line, depth)) : lines[end + 1]?.search(/\S/) > item[1].length;
      if (!goesOn) break;
      end += 1;
    }
    const rest = lines.slice(at + 1, end).map((line) => line.slice(Math.min(inner, Math.max(0, line.search(/\S/)))));
    const body = added(made, "li");
    blocks([item[3] ?? "", ...rest], body, depth + 1);
    if (body.children.length && body.firstChild.tagName === "P") body.firstChild.replaceWith(...body.firstChild.childNodes);
    at = past(lines, end, (line) => !line.trim());
  }
  return at;
}

function table(lines, at, into) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
  const aligned = cells(lines[at + 1]).map((mark) => ({ "::": "center", "-:": "right" })[mark.at(0) + mark.at(-1)] ?? "left");
  const end = past(lines, at + 2, (line) => line.includes("|"));
  const box = added(into, "div");
  box.className = "table";
  const made = added(box, "table");
  const row = (part, kind, line) => {
    const drawn = added(part, "tr");
    cells(line).slice(0, aligned.length).forEach((cell, column) => {
      const shown = added(drawn, kind);
      shown.className = aligned[column];
      spans(cell, shown);
    });
  };
  row(added(made, "thead"), "th", lines[at]);
  const body = added(made, "tbody");
  lines.slice(at + 2, end).forEach((line) => row(body, "td", line));
  return end;
}

/** Text with emphasis, code and links. */
function spans(text, into, depth = 0) {
  let at = 0;
  for (const match of depth < DEEPEST ? text.matchAll(SPAN) : []) {
    const [whole, escaped, , inCode, label, target, address, , strong, , emphasis, struck] = match;
    into.append(text.slice(at, match.index));
    at = match.index + whole.length;
    if (escaped !== undefined) into.append(escaped);
    else if (inCode !== undefined) added(into, "code", inCode.replace(/^ (.*\S.*) $/s, "$1"));
    else if (target !== undefined || address !== undefined) link(whole, label ?? address, target ?? address, into, depth);
    else if (strong !== undefined) spans(strong, added(into, "strong"), depth + 1);
    else if (emphasis !== undefined) spans(emphasis, added(into, "em"), depth + 1);
    else spans(struck, added(into, "del"), depth + 1);
  }
  into.append(text.slice(at));
}

/** A link, opened elsewhere, that may lead to the web or to a mailbox; others stay text. Images are links: none are loaded. */
function link(whole, label, target, into, depth) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(target)) {
    into.append(whole);
    return;
  }
  const made = added(into, "a");
  Object.assign(made, { href: target, target: "_blank", rel: "noopener noreferrer nofollow", title: target });
  if (label === target) made.append(label);
  else spans(label || target, made, depth + 1);
}

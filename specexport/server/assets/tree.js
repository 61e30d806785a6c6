"use strict";

const DEEPEST_COLOUR = 6;
const SVG = "http://www.w3.org/2000/svg";
const COLUMN = 128, ROW = 32, BOX = 104, LETTERS = 13; // pixels of a tree's columns, rows and boxes; letters in a box

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
class Tree {
  constructor(step) {
    this.parents = [...step.parents];
    this.drafts = this.parents.length - 1;
    this.labels = this.parents.map((_, node) => (node ? step.drafted[node - 1] : "the text"));
    this.kept = new Set([0, ...step.path]);
    if (!step.drafted.length) step.path.forEach((node, at) => (this.labels[node] = step.tokens[at]?.[0])); // others are unknown
    const own = step.tokens[step.path.length]; // not there if the output ended before
    if (own) {
      this.kept.add(this.parents.length);
      this.parents.push(step.path.at(-1) ?? 0);
      this.labels.push(own[0]);
    }
    this.children = this.parents.map(() => []);
    this.parents.forEach((up, node) => up >= 0 && this.children[up].push(node));
    this.depth = [];
    this.y = [];
    this.rows = 0;
    this.place(0, 0);
  }

  place(node, depth) {
    const below = this.children[node];
    this.depth[node] = depth;
    below.forEach((child) => this.place(child, depth + 1));
    // A parent stands in the middle of its children.
    this.y[node] = below.length ? (this.y[below[0]] + this.y[below.at(-1)]) / 2 : ROW * this.rows++ + ROW / 2;
  }

  drawn() {
    const half = COLUMN / 2, x = this.depth.map((depth) => COLUMN * depth + half), { y, parents, kept } = this;
    const width = Math.max(...x) + half, height = this.rows * ROW;
    const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    parents.forEach((up, node) => {
      if (up < 0) return;
      const d = `M${x[up]} ${y[up]}c${half} 0 ${half} ${y[node] - y[up]} ${COLUMN} ${y[node] - y[up]}`;
      svg.append(element("path", { d, class: kept.has(node) ? "kept" : "" }));
    });
    this.boxes = parents.map((_, node) => {
      const drafted = node && node <= this.drafts;
      const colour = drafted ? ` p${Math.min(this.depth[node], DEEPEST_COLOUR)}` : "";
      const label = element("text", { x: x[node], y: y[node] }, shown(this.labels[node] ?? "?"));
      const box = element("rect", { x: x[node] - BOX / 2, y: y[node] - 12, width: BOX, height: 24, rx: 6 });
      const made = element("g", { class: (kept.has(node) ? "kept" : "") + colour }, box, label);
      svg.append(made);
      return made;
    });
    return svg;
  }

  /** What a node is, in words. */
  said(node) {
    if (!node) return "The text so far.";
    const label = shown(this.labels[node] ?? "?");
    if (node > this.drafts) return `${label}: the target's own token.`;
    return `${label}: draft token at position ${this.depth[node]}, ${this.kept.has(node) ? "accepted" : "rejected"}.`;
  }

  /** The node that a key leads to from another; undefined for none. */
  next(node, key) {
    const column = this.depth.flatMap((depth, other) => (depth === this.depth[node] ? [other] : []));
    column.sort((one, other) => this.y[one] - this.y[other]);
    const at = column.indexOf(node), below = this.children[node];
    switch (key) {
      case "ArrowLeft": return node ? this.parents[node] : undefined;
      case "ArrowRight": return below.find((child) => this.kept.has(child)) ?? below[0];
      case "ArrowUp": return column[at - 1];
      case "ArrowDown": return column[at + 1];
      case "Home": return 0;
      case "End": return Math.max(...this.kept);
      default: return undefined;
    }
  }
}

/** Shows one tree at a time in the page's figure. */
const trees = {
  tree: null,
  node: 0,

  show(step, said) {
    this.tree = new Tree(step);
    find("caption").textContent = said;
    find("tree").replaceChildren(this.tree.drawn());
    find("tree").setAttribute("aria-label", `Token tree of ${said}`);
    find("node").textContent = "";
    this.node = 0;
  },

  move(node) {
    this.tree.boxes[this.node].classList.remove("current");
    this.node = node;
    this.tree.boxes[node].classList.add("current");
    this.tree.boxes[node].scrollIntoView({ block: "nearest", inline: "nearest" });
    find("node").textContent = this.tree.said(node);
  },

  /** Arrow keys go from node to node, Page Up and Page Down from step to step. */
  pressed(event) {
    const steps = { PageUp: -1, PageDown: 1 };
    const chosen = document.querySelector(".step.chosen");
    if (!this.tree) return;
    if (event.key in steps) (steps[event.key] < 0 ? chosen?.previousSibling : chosen?.nextSibling)?.choose();
    else {
      const next = this.tree.next(this.node, event.key);
      if (next === undefined) return;
      this.move(next);
    }
    event.preventDefault();
  },
};

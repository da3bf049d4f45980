// Builds elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element: `text` sets its text, `onclick` and the like add listeners, all others are attributes. */
export const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);

/** The same for SVG. */
export const svg = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export const byId = (id) => document.getElementById(id);

/** A horizontal bar of parts, each [class, share from 0 to 1]; `label` describes it to those who do not see it. */
export function bar(parts, label) {
  const track = el("span", { class: "track", role: "img", "aria-label": label });
  for (const [kind, share] of parts) {
    if (!share) continue; // The others are at least two pixels wide.
    const part = el("span", { class: `part ${kind}` });
    part.style.width = `${100 * share}%`;
    track.append(part);
  }
  return track;
}

// Markdown to DOM nodes. Text only ever becomes text nodes, so that no answer can bring markup or scripts of its own.

import { h } from "./net.js";

const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|__(?=\S)(.+?)__|~~(?=\S)(.+?)~~|\*(?=[^\s*])(.+?)\*(?!\*)|\b_(?=[^\s_])(.+?)_\b|\[([^\]]+)\]\(([^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?])|\\([!-\/:-@[-`{-~])/;
const WORDS = new Set(("abstract and as assert async await break case catch class const continue def default del do elif else end enum except export extends false False finally fn for from func function global if impl import in instanceof interface is lambda let loop match mut new nil None not null or package pass private public pub raise return select self static struct super switch this throw true True try type typeof union use var void while where with yield SELECT FROM WHERE INSERT UPDATE DELETE JOIN GROUP ORDER BY int float double char bool string echo fi then done").split(" "));
const TOKEN = /("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)|(\/\/[^\n]*|#[^\n]*|--\s[^\n]*|\/\*[^]*?\*\/)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

function inline(text) {
  const found = [];
  while (text) {
    const match = INLINE.exec(text);
    if (!match) break;
    if (match.index) found.push(text.slice(0, match.index));
    const [whole, , code, bold, bold2, struck, em, em2, label, href, bare, escaped] = match;
    if (code !== undefined) found.push(h("code", {}, code.trim() || code));
    else if (bold || bold2) found.push(h("strong", {}, inline(bold || bold2)));
    else if (struck) found.push(h("del", {}, inline(struck)));
    else if (em || em2) found.push(h("em", {}, inline(em || em2)));
    else if (escaped) found.push(escaped);
    else if (/^(https?:|mailto:)/.test(href || bare)) {
      found.push(h("a", { href: href || bare, target: "_blank", rel: "noopener noreferrer" }, label ? inline(label) : bare));
    } else found.push(whole);
    text = text.slice(match.index + whole.length);
  }
  return text ? [...found, text] : found;
}

/** A code block with a button that copies it. Colours: strings, comments, numbers, common keywords. */
function code(text, language) {
  const body = h("code");
  let at = 0;
  for (const match of text.matchAll(TOKEN)) {
    const kind = match[1] ? "s" : match[2] ? "c" : match[3] ? "n" : WORDS.has(match[4]) ? "k" : null;
    if (!kind) continue;
    body.append(text.slice(at, match.index), h("span", { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  body.append(text.slice(at));
  const copy = h("button", { class: "link", onclick: () => navigator.clipboard.writeText(text) }, "copy");
  return h("figure", {}, h("figcaption", {}, language || "text", copy), h("pre", {}, body));
}

function list(lines) {
  const indent = lines[0].search(/\S/), ordered = /^\s*\d/.test(lines[0]), items = [];
  for (const line of lines) {
    const mark = /^(\s*)(?:[-*+]|\d+[.)])\s+(.*)$/.exec(line);
    if (mark && mark[1].length <= indent + 1) items.push([mark[2]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent + 2)));
  }
  const node = h(ordered ? "ol" : "ul", {}, items.map(([first, ...rest]) => {
    const task = /^\[([ xX])\]\s+(.*)$/.exec(first);
    const head = task ? [h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), " ", ...inline(task[2])] : inline(first);
    return h("li", {}, head, rest.length ? [...blocks(rest)] : []);
  }));
  if (ordered && parseInt(lines[0], 10) > 1) node.start = parseInt(lines[0], 10);
  return node;
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim());

function* blocks(lines) {
  let i = 0;
  const take = test => {
    const from = i;
    while (i < lines.length && test(lines[i])) i++;
    return lines.slice(from, i);
  };
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) i++;
    else if ((match = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line))) {
      i++;
      const inside = take(one => !one.trim().startsWith(match[1]));
      i++;
      yield code(inside.join("\n"), match[2]);
    } else if ((match = /^(#{1,6})\s+(.*?)#*$/.exec(line))) {
      i++;
      yield h(`h${Math.min(6, match[1].length + 2)}`, {}, inline(match[2]));
    } else if (/^\s*([-*_])\s*(\1\s*){2,}$/.test(line)) {
      i++;
      yield h("hr");
    } else if (/^\s*>/.test(line)) {
      yield h("blockquote", {}, [...blocks(take(one => /^\s*>/.test(one)).map(one => one.replace(/^\s*>\s?/, "")))]);
    } else if (/^\s*([-*+]|\d+[.)])\s+/.test(line)) {
      yield list(take(one => /^\s*([-*+]|\d+[.)])\s+/.test(one) || /^\s+\S/.test(one)));
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[i + 1] || "")) {
      const [head, , ...rows] = take(one => one.includes("|"));
      yield h("table", {}, h("tr", {}, cells(head).map(cell => h("th", {}, inline(cell)))),
        rows.map(row => h("tr", {}, cells(row).map(cell => h("td", {}, inline(cell))))));
    } else {
      const text = take(one => one.trim() && !/^\s*(```|~~~|#{1,6}\s|>|[-*+]\s)/.test(one) || one === line);
      yield h("p", {}, text.flatMap((one, at) => at ? [h("br"), ...inline(one)] : inline(one)));
    }
  }
}

/** The nodes of a Markdown text, which may still be growing. */
export const markdown = text => [...blocks(text.split("\n"))];

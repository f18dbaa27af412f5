"use strict";
// Markdown of a model as elements. Its text is untrusted: HTML in it stays text, DOMPurify sanitizes the markup that
// marked makes, images become links, and long or odd texts are shown as they are.
const MAX_MARKDOWN = 200_000; // characters of one message that are parsed; a longer message is shown as plain text
const MAX_INLINE = 4_000; // characters of a paragraph whose marks are read: marked's time grows with their square
const LINK_PROTOCOLS = ["http:", "https:", "mailto:"];
const RENDER_SHARE = 4; // a rendering is followed by a pause of this many times its duration
const FENCE = /^(`{3,}|~{3,})([^\n]*)\n/;
const SANITIZING = {
  ALLOWED_TAGS: "p br strong em del h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code a hr table thead tbody tr th td".split(" "),
  ALLOWED_ATTR: ["href", "align", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const escapeText = (text) => text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);
const markdown = new marked.Marked({
  gfm: true,
  tokenizer: { html() {}, tag() {} }, // HTML is text
  renderer: {
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image: ({ href, text }) => `<a href="${escapeText(href)}">${escapeText("image: " + (text || href))}</a>`,
  },
});

// Return how many of a growing text's blocks can no longer change: those before the last one, or before the one before
// it while the first line of the last one is incomplete, as "-" may be an item of a list or underline a heading.
function countSettled(blocks) {
  const last = blocks.findLastIndex((block) => block.type !== "space");
  if (last <= 0) return 0;
  if (blocks.slice(last).some((block) => block.raw.includes("\n"))) return last;
  return Math.max(0, blocks.findLastIndex((block, index) => index < last && block.type !== "space"));
}

// Return the tokens of the blocks of a text. The tokens' `raw` together are the text.
function readBlocks(text) {
  const lexer = new marked.Lexer(markdown.defaults);
  const blocks = lexer.blockTokens(text, lexer.tokens);
  for (const { src, tokens } of lexer.inlineQueue) {
    if (src.length > MAX_INLINE) tokens.push({ type: "text", raw: src, text: src });
    else lexer.inlineTokens(src, tokens);
  }
  return blocks;
}

function renderBlocks(blocks) {
  const fragment = DOMPurify.sanitize(markdown.parser(blocks), SANITIZING);
  for (const link of fragment.querySelectorAll("a")) finishLink(link);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = makeElement("div", "wide");
    frame.tabIndex = 0; // so that the keyboard can scroll it
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "Table");
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = code.className.replace(/^language-/, "");
    code.parentElement.replaceWith(makeCodeBlock(language, code.textContent.replace(/\n$/, "")).block);
  }
  return fragment;
}

function finishLink(link) {
  if (!LINK_PROTOCOLS.includes(link.protocol)) { // also a link without an address
    link.replaceWith(...link.childNodes);
    return;
  }
  link.title = link.href; // where it leads, whatever its text says
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

function makeCodeBlock(language, text) {
  const block = makeElement("figure", "code"), head = makeElement("figcaption", ""), frame = makeElement("pre", "wide");
  const code = makeElement("code", ""), content = document.createTextNode(text);
  const name = language.trim().split(/\s/)[0].slice(0, 30);
  head.append(makeElement("span", "", name || "text"), makeCopyButton(() => content.data, "Copy code"));
  frame.tabIndex = 0;
  frame.setAttribute("aria-label", `Code, ${name || "text"}`);
  frame.setAttribute("role", "group");
  code.append(content);
  frame.append(code);
  block.append(head, frame);
  return { block, content };
}

function makeCopyButton(readText, label = "Copy") {
  const button = makeElement("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const isCopied = await copyText(readText());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(isCopied ? "Copied." : "This browser did not allow the copy.");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// The clipboard is closed to pages without TLS on other machines' addresses; a selection can still be copied there.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = makeElement("textarea", "unseen"), focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}

// MarkdownView shows a text that grows. Blocks that can no longer change are rendered once; only the last block is
// rendered again, at most once a frame and for at most a fifth of the time. A block of code only grows.
class MarkdownView {
  constructor(element, afterRender = () => {}) {
    this.element = element;
    this.afterRender = afterRender;
    this.source = "";
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.settled = 0; // this much of the source is rendered and stays
    this.open = []; // the elements of the last blocks, which are replaced
    this.fence = null; // an open block of code: its marks, its text node, how much of the source it shows
    this.plain = null; // the text node of a text that is not parsed
    this.isPlanned = false;
    this.notBefore = 0;
    this.renderings = 0;
  }

  append(text) {
    this.source += text;
    if (this.isPlanned) return;
    this.isPlanned = true;
    const wait = this.notBefore - performance.now();
    const render = () => requestAnimationFrame(() => { if (this.isPlanned) this.update(); });
    if (wait > 0) setTimeout(render, wait);
    else render();
  }

  update(isLast = false) {
    const start = performance.now();
    this.isPlanned = false;
    this.renderings += 1;
    try {
      if (this.source.length > MAX_MARKDOWN) throw new RangeError("too long");
      this.renderTail(isLast);
    } catch { // too deeply nested, or too long
      this.showPlain();
    }
    this.afterRender();
    this.notBefore = performance.now() + RENDER_SHARE * (performance.now() - start);
  }

  // Show the whole source, now that it is complete.
  finish(text = this.source) {
    this.source = text;
    if (/^ {0,3}\[[^\]\n]+\]:/m.test(text)) this.clear(); // links may be defined below their use
    this.update(true);
  }

  showPlain() {
    if (!this.plain) {
      this.element.replaceChildren();
      const frame = makeElement("div", "plain");
      this.plain = document.createTextNode("");
      frame.append(this.plain);
      this.element.append(frame);
    }
    this.plain.appendData(this.source.slice(this.plain.length));
  }

  renderTail(isLast) {
    if (this.plain) throw new RangeError("shown as plain text");
    if (this.fence && !this.growFence(isLast)) {
      if (isLast) this.fence.content.data = this.fence.content.data.replace(/\n$/, "");
      return;
    }
    const tail = this.source.slice(this.settled), blocks = readBlocks(tail);
    const kept = isLast ? blocks : blocks.slice(0, countSettled(blocks));
    for (const node of this.open) node.remove();
    this.open = [];
    if (kept.length) {
      this.element.append(renderBlocks(kept));
      this.settled += kept.reduce((sum, block) => sum + block.raw.length, 0);
    }
    const rest = blocks.slice(kept.length), fence = FENCE.exec(this.source.slice(this.settled));
    if (!isLast && fence && rest[0]?.type === "code") {
      const { block, content } = makeCodeBlock(fence[2], "");
      this.element.append(block);
      this.fence = { mark: fence[1], content, shown: this.settled + fence[0].length };
      if (this.growFence(isLast)) this.renderTail(isLast);
    } else if (rest.length) {
      const fragment = renderBlocks(rest);
      this.open = [...fragment.childNodes];
      this.element.append(fragment);
    }
  }

  // Add new lines to the open block of code. Return whether it is closed.
  growFence(isLast) {
    const fence = this.fence, closing = new RegExp(`^ {0,3}\\${fence.mark[0]}{${fence.mark.length},}[ \\t]*$`);
    for (;;) {
      const end = this.source.indexOf("\n", fence.shown), isComplete = end >= 0;
      const line = this.source.slice(fence.shown, isComplete ? end : undefined);
      const isStart = fence.shown === 0 || this.source[fence.shown - 1] === "\n";
      if (isStart && closing.test(line) && (isComplete || isLast)) {
        fence.content.data = fence.content.data.replace(/\n$/, "");
        this.settled = isComplete ? end + 1 : this.source.length;
        this.fence = null;
        return true;
      }
      // A line that may become the closing one waits.
      if (!isComplete && !isLast && isStart && /^ {0,3}[`~]*[ \t]*$/.test(line)) return false;
      fence.content.appendData(line + (isComplete ? "\n" : ""));
      fence.shown += line.length + (isComplete ? 1 : 0);
      if (!isComplete) return false;
    }
  }
}

// Show a complete text.
function showMarkdown(element, text) {
  new MarkdownView(element).finish(text);
}

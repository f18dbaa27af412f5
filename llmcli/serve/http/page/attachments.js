"use strict";
// Text files that are sent with the next message, as text.
const MAX_FILES = 10, MAX_FILE_BYTES = 512 * 1024, MAX_ALL_BYTES = 1024 * 1024;
const IMAGE = /\.(png|jpe?g|gif|webp|bmp|tiff?|avif|heic)$/i;
let attached = []; // {name, text}

// Read files for the next message. A line above the message names those that cannot be attached.
async function attachFiles(files) {
  const problems = [];
  for (const file of files) {
    const used = attached.reduce((sum, { text }) => sum + text.length, 0);
    if (file.type.startsWith("image/") || IMAGE.test(file.name)) problems.push(`${file.name} is an image; this server's models read text only.`);
    else if (attached.length >= MAX_FILES) problems.push(`${file.name}: a message takes at most ${MAX_FILES} files.`);
    else if (file.size > MAX_FILE_BYTES) problems.push(`${file.name} is larger than ${MAX_FILE_BYTES / 1024} KiB.`);
    else if (used + file.size > MAX_ALL_BYTES) problems.push(`${file.name}: the files of a message may have ${MAX_ALL_BYTES / 1024} KiB together.`);
    else {
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        attached.push({ name: file.name.replace(/[\p{C}`]/gu, "_").slice(0, 255), text });
      } catch {
        problems.push(`${file.name} is not a text file in UTF-8.`);
      }
    }
  }
  showAttached();
  showProblem(problems.join(" "));
}

function showAttached() {
  byId("attached").replaceChildren(...attached.map((file, index) => {
    const chip = makeFileChip(file);
    chip.append(makeButton("×", `Remove ${file.name}`, () => {
      attached.splice(index, 1);
      showAttached();
      byId("attach").focus();
    }));
    return chip;
  }));
}

function makeFileChip({ name, text }) {
  const chip = makeElement("li", "chip"), size = text.length < 1024 ? `${text.length} B` : `${(text.length / 1024).toFixed(1)} KiB`;
  chip.append(makeElement("span", "name", name), makeElement("span", "small", size));
  return chip;
}

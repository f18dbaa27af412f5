"use strict";
// The chat of one page over the server's own API. What a model or a server says becomes text and never markup: only
// textContent and canvases are written to.
const at = (id) => document.getElementById(id);
const FIELDS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"];
const WINDOW = 2000; // ms that the live rate looks back
let said = []; // the conversation, as the API takes it
let chats = true; // false: a base model, which continues a text
let running = null; // the AbortController of the answer under way
let key = sessionStorage.getItem("key") || "";
let stamps = [], rates = [], report = null;

function headers() {
  return key ? { "content-type": "application/json", authorization: "Bearer " + key } : { "content-type": "application/json" };
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    await unlock();
    return call(path, options);
  }
  if (!answer.ok) {
    const found = await answer.json().catch(() => null);
    const again = answer.headers.get("retry-after");
    throw new Error((found?.error?.message || answer.statusText || "status " + answer.status) + (again ? ` (again in ${again} s)` : ""));
  }
  return answer;
}

let asking = null; // one dialog for all who wait for a key
function unlock() {
  asking ??= new Promise((done) => {
    at("key").value = "";
    at("locked").addEventListener("close", () => {
      key = at("key").value.trim();
      sessionStorage.setItem("key", key);
      asking = null;
      done();
    }, { once: true });
    at("locked").showModal();
  });
  return asking;
}

function tell(text, wrong = false) {
  at("state").textContent = text;
  at("state").classList.toggle("wrong", wrong);
}

function element(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

function turn(role, text = "") {
  at("empty")?.remove();
  const made = element("article", "turn " + role);
  made.setAttribute("aria-label", role);
  made.append(element("div", "text", text));
  at("log").append(made);
  follow(true);
  return made;
}

function follow(always = false) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function body() {
  const chosen = {};
  for (const name of FIELDS) if (at(name).value !== "") chosen[name] = Number(at(name).value);
  const system = at("system").value.trim();
  const shared = { ...chosen, stream: true, stream_options: { include_usage: true } };
  if (!chats) return ["/v1/completions", { ...shared, prompt: said.map((one) => one.content).join("") }];
  return ["/v1/chat/completions", { ...shared, messages: system ? [{ role: "system", content: system }, ...said] : said }];
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer() {
  const made = turn("assistant"), text = made.querySelector(".text"), figures = element("p", "figures");
  let whole = "", thinking = null, begun = performance.now(), first = 0, usage = null, timings = null, finish = "";
  made.classList.add("writing");
  made.append(figures);
  running = new AbortController();
  stamps = [];
  busy(true);
  try {
    const [path, asked] = body();
    for await (const chunk of events(await call(path, { method: "POST", body: JSON.stringify(asked), signal: running.signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      timings = chunk.timings || timings;
      const choice = chunk.choices?.[0];
      const thought = choice?.delta?.reasoning_content || "", word = choice?.delta?.content ?? choice?.text ?? "";
      finish = choice?.finish_reason || finish;
      if (!thought && !word) continue;
      if (!first) {
        first = performance.now();
        at("ttft").textContent = (first - begun).toFixed(0) + " ms";
      }
      stamps.push(performance.now());
      if (thought) {
        thinking ??= made.insertBefore(element("div", "thinking text"), text);
        thinking.textContent += thought;
      }
      if (word) {
        whole += word;
        text.textContent = whole;
      }
      follow();
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else made.append(element("p", "wrong", error.message));
  } finally {
    made.classList.remove("writing");
    running = null;
    busy(false);
    if (whole) said.push({ role: "assistant", content: whole });
    else if (said.length && !thinking) at("text").value ||= said.pop().content; // nothing came: it can be asked again
    sum(figures, timings, usage, finish, first - begun);
    poll();
  }
}

function sum(figures, timings, usage, finish, ttft) {
  const tokens = timings?.predicted_n ?? stamps.length;
  const gaps = stamps.length > 1 ? (stamps.at(-1) - stamps[0]) / (stamps.length - 1) : 0;
  const rate = timings?.predicted_per_second || (gaps ? 1000 / gaps : 0);
  const reused = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n;
  if (rate) at("rate").textContent = rate.toFixed(1);
  at("count").textContent = tokens;
  at("reused").textContent = reused ?? "–";
  const words = [`${tokens} tokens`];
  if (rate) words.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens && ttft > 0) words.push(`first after ${(timings?.ttft_ms ?? ttft).toFixed(0)} ms`);
  if (usage) words.push(`prompt ${usage.prompt_tokens}, ${reused ?? 0} cached`);
  if (finish && finish !== "stop") words.push(finish === "length" ? "cut off at its limit" : finish);
  figures.textContent = words.join(" · ");
}

function busy(now) {
  at("send").hidden = now;
  at("stop").hidden = !now;
  at("fresh").disabled = now;
  at("log").setAttribute("aria-busy", String(now));
  if (!now) at("text").focus();
}

function send(event) {
  event?.preventDefault();
  const text = at("text").value;
  if (running || !text.trim()) return;
  at("text").value = "";
  grow();
  said.push({ role: "user", content: text });
  turn("user", text);
  answer();
}

function grow() {
  const text = at("text");
  text.style.height = "auto";
  text.style.height = text.scrollHeight + 2 + "px";
}

// The pictures: a rate over time, and a cell a square. Colours come from the style sheet.
function pen(canvas) {
  const scale = devicePixelRatio || 1, wide = canvas.clientWidth, high = Number(canvas.getAttribute("data-high") || canvas.height);
  canvas.setAttribute("data-high", high);
  canvas.width = wide * scale;
  canvas.height = high * scale;
  canvas.style.height = high + "px";
  const drawn = canvas.getContext("2d");
  drawn.scale(scale, scale);
  return [drawn, wide, high, getComputedStyle(document.documentElement)];
}

function drawSpeed() {
  const [drawn, wide, high, style] = pen(at("speed")), most = Math.max(1, ...rates);
  drawn.strokeStyle = style.getPropertyValue("--accent");
  drawn.lineWidth = 1.5;
  drawn.beginPath();
  rates.forEach((rate, n) => drawn.lineTo((n / 119) * wide, high - 2 - (rate / most) * (high - 6)));
  drawn.stroke();
}

function drawCells() {
  const [drawn, wide, high, style] = pen(at("cells")), total = report?.cells || 0;
  if (!total) return;
  // Squares as large as fit; where the cells are too many, one stands for several.
  let size = Math.max(6, Math.floor(Math.sqrt((wide * high) / total)));
  while (size > 6 && Math.ceil(total / Math.floor(wide / size)) * size > high) size -= 1;
  const across = Math.floor(wide / size), squares = Math.min(total, across * Math.floor(high / size)), each = total / squares;
  const colours = [];
  for (const one of report.sequences) for (let n = 0; n < one.own_cells; n++) colours.push(one);
  for (let n = 0; n < squares; n++) {
    const one = colours[Math.floor(n * each)], gap = 1;
    drawn.globalAlpha = one ? (one.state === "running" ? 1 : 0.5) : 1;
    drawn.fillStyle = one ? `hsl(${(160 + one.slot * 67) % 360} 50% 45%)` : style.getPropertyValue("--line");
    drawn.fillRect((n % across) * size, Math.floor(n / across) * size, size - gap, size - gap);
  }
  const mib = (report.allocated_bytes ?? report.predicted_bytes ?? 0) / 2 ** 20;
  const many = report.sequences.length, words = [`${report.used_cells} of ${total} cells`, `${many} sequence${many === 1 ? "" : "s"}`];
  if (report.saved_cells) words.push(`${report.saved_cells} saved by sharing`);
  if (report.waiting) words.push(`${report.waiting} wait`);
  if (mib) words.push(`${mib < 10 ? mib.toFixed(1) : mib.toFixed(0)} MiB`);
  at("cellsays").textContent = words.join(" · ");
}

async function poll() {
  if (document.hidden || asking || !at("cache").open) return;
  try {
    report = await (await call("/v1/kv")).json();
    drawCells();
    tell(report.running || report.waiting ? `${report.running} running · ${report.waiting} waiting` : "ready");
  } catch (error) {
    tell(error.message, true);
  }
}

function tick() {
  const now = performance.now();
  while (stamps.length > 2 && running && now - stamps[0] > WINDOW) stamps.shift();
  if (running && stamps.length > 1) {
    const rate = ((stamps.length - 1) / (stamps.at(-1) - stamps[0])) * 1000;
    at("rate").textContent = rate.toFixed(1);
    at("count").textContent = "…";
    rates = [...rates.slice(-119), rate];
    drawSpeed();
  }
}

function settings() {
  const kept = JSON.parse(localStorage.getItem("settings") || "{}");
  for (const name of [...FIELDS, "system"]) {
    at(name).value = kept[name] ?? "";
    at(name).addEventListener("change", () => {
      const now = Object.fromEntries([...FIELDS, "system"].map((one) => [one, at(one).value]));
      localStorage.setItem("settings", JSON.stringify(now));
    });
  }
}

async function begin() {
  settings();
  if (innerWidth <= 720) for (const name of ["live", "cache"]) at(name).open = false;
  at("ask").addEventListener("submit", send);
  at("stop").addEventListener("click", () => running?.abort());
  at("text").addEventListener("input", grow);
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  at("fresh").addEventListener("click", () => {
    said = [];
    at("log").replaceChildren();
    at("text").focus();
  });
  for (const name of ["live", "cache"]) at(name).addEventListener("toggle", () => { drawSpeed(); poll(); });
  addEventListener("resize", () => { drawSpeed(); drawCells(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawSpeed(); drawCells(); });
  try {
    const [model] = (await (await call("/v1/models")).json()).data;
    at("model").textContent = document.title = model.id;
    chats = model.meta?.chat ?? true;
    if (model.meta?.generates === false) {
      at("text").disabled = at("send").disabled = true;
      at("text").placeholder = "This model makes embeddings: POST /v1/embeddings";
    } else if (!chats) at("text").placeholder = "A base model: it continues this text";
    tell("ready");
  } catch (error) {
    tell(error.message, true);
  }
  setInterval(tick, 250);
  setInterval(() => { if (running || performance.now() % 5000 < 1000) poll(); }, 1000);
  poll();
}

begin();

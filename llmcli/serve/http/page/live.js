"use strict";
// The panel's figures: tokens per second, and the cells of the server's cache.
const RATE_WINDOW_MS = 2000; // the live rate is measured over this time
const RATES_SHOWN = 120; // points of the rate's curve
let tokenTimes = [], rates = [], cacheReport = null;

// Return a canvas's context in CSS pixels, its width and height, and the page's style, which has the colors.
function prepareCanvas(canvas) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = Number(canvas.getAttribute("data-height") || canvas.height);
  canvas.setAttribute("data-height", height);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, height, getComputedStyle(document.documentElement)];
}

function drawSpeed() {
  const [context, width, height, style] = prepareCanvas(byId("speed")), highest = Math.max(1, ...rates);
  context.strokeStyle = style.getPropertyValue("--accent");
  context.lineWidth = 1.5;
  context.beginPath();
  rates.forEach((rate, index) => {
    context.lineTo((index / (RATES_SHOWN - 1)) * width, height - 2 - (rate / highest) * (height - 6));
  });
  context.stroke();
}

function drawCells() {
  const [context, width, height, style] = prepareCanvas(byId("cells")), total = cacheReport?.cells || 0;
  if (!total) return;
  // The largest squares that fit; if there are too many cells, one square shows several.
  let size = Math.max(6, Math.floor(Math.sqrt((width * height) / total)));
  while (size > 6 && Math.ceil(total / Math.floor(width / size)) * size > height) size -= 1;
  const columns = Math.floor(width / size), squares = Math.min(total, columns * Math.floor(height / size));
  const cellsPerSquare = total / squares;
  const owners = [];
  for (const sequence of cacheReport.sequences) for (let n = 0; n < sequence.own_cells; n++) owners.push(sequence);
  for (let n = 0; n < squares; n++) {
    const owner = owners[Math.floor(n * cellsPerSquare)], gap = 1;
    context.globalAlpha = owner ? (owner.state === "running" ? 1 : 0.5) : 1;
    context.fillStyle = owner ? `hsl(${(160 + owner.slot * 67) % 360} 50% 45%)` : style.getPropertyValue("--line");
    context.fillRect((n % columns) * size, Math.floor(n / columns) * size, size - gap, size - gap);
  }
  const mib = (cacheReport.allocated_bytes ?? cacheReport.predicted_bytes ?? 0) / 2 ** 20;
  const count = cacheReport.sequences.length;
  const words = [`${cacheReport.used_cells} of ${total} cells`, `${count} sequence${count === 1 ? "" : "s"}`];
  if (cacheReport.saved_cells) words.push(`${cacheReport.saved_cells} saved by sharing`);
  if (cacheReport.waiting) words.push(`${cacheReport.waiting} waiting`);
  if (mib) words.push(`${mib < 10 ? mib.toFixed(1) : mib.toFixed(0)} MiB`);
  byId("cacheSummary").textContent = words.join(" · ");
}

async function pollCache() {
  if (document.hidden || keyPrompt || !byId("cache").open) return;
  try {
    cacheReport = await (await fetchApi("/v1/kv")).json();
    drawCells();
    const { running, waiting } = cacheReport;
    showState(running || waiting ? `${running} running · ${waiting} waiting` : "ready");
  } catch (error) {
    showState(error.message, true);
  }
}

function updateRate() {
  const now = performance.now();
  while (tokenTimes.length > 2 && controller && now - tokenTimes[0] > RATE_WINDOW_MS) tokenTimes.shift();
  if (controller && tokenTimes.length > 1) {
    const rate = ((tokenTimes.length - 1) / (tokenTimes.at(-1) - tokenTimes[0])) * 1000;
    byId("rate").textContent = rate.toFixed(1);
    byId("count").textContent = "…";
    rates = [...rates.slice(1 - RATES_SHOWN), rate];
    drawSpeed();
  }
}

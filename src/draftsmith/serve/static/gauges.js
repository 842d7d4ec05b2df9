// The figures of a session. NE, A/D and A/O are the server's; null: not known yet.

import { byId } from "./browser.js";

const [WIDTH, HEIGHT, MARGIN] = [240, 44, 3];

export function renderGauges({ figures, ms, updates, coalesced, measured, measuring }) {
  const put = (id, text) => (byId(id).textContent = text);
  put("ms", ms.length ? whole(ms.at(-1)) : "–");
  put("ne", figures.ne === null ? "–" : figures.ne.toFixed(2));
  put("updates", whole(updates));
  put("coalesced", whole(coalesced));
  for (const id of ["ad", "ao"]) {
    put(id, figures[id] === null ? "–" : `${whole(100 * figures[id])} %`);
    byId(`${id}-bar`).setAttribute("width", 100 * (figures[id] ?? 0));
  }
  drawSpark(ms);
  byId("measure").disabled = measuring;
  put("measure", measuring ? "Measuring …" : "Measure");
  if (!measured) return;
  const { speedup, tps, tps_ar: plain } = measured;
  put("speedup", speedup === null ? "–" : `${speedup.toFixed(2)}×`);
  put(
    "measured",
    speedup === null
      ? "say something first"
      : `${whole(tps)} against ${whole(plain)} tokens/s, ${measured.updates} updates`,
  );
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function drawSpark(values) {
  const most = Math.max(...values, 1);
  const step = WIDTH / Math.max(1, values.length - 1);
  const points = values.map((value, place) => {
    const height = HEIGHT - MARGIN - (value / most) * (HEIGHT - 2 * MARGIN);
    return `${(place * step).toFixed(1)},${height.toFixed(1)}`;
  });
  const line = points.length > 1 ? points : [];
  byId("spark-line").setAttribute("points", line.join(" "));
  const area = line.length ? [`0,${HEIGHT}`, ...line, `${WIDTH},${HEIGHT}`] : [];
  byId("spark-area").setAttribute("points", area.join(" "));
}

// Puts the page together.

import { address, after, byId, copy, download, query, world } from "./browser.js";
import { Client } from "./client.js";
import { Dials } from "./dials.js";
import { FORMATS, toText } from "./exports.js";
import { renderGauges } from "./gauges.js";
import { startInput } from "./input.js";
import { codeOf } from "./languages.js";
import { startOverlay } from "./overlay.js";
import { Rows } from "./rows.js";

const BEAT_MS = 20_000;
const NOTICE_MS = 8000;
const STATUS = {
  connecting: ["connecting", ""],
  open: ["live", ""],
  away: ["away", "The connection is lost. The text stays; trying again …"],
  resting: ["resting", "Nothing was said for long. It goes on when you do."],
  closed: ["closed", ""],
};

function startPage() {
  let status = "connecting";
  let painted = true;
  let [told, notice] = ["", null];
  let forget = () => {};

  const rows = new Rows({
    list: byId("rows"),
    scroll: byId("scroll"),
    newest: byId("newest"),
    older: byId("older"),
    announcer: byId("announcer"),
  });
  const client = new Client(world, {
    changed: paintSoon,
    status(name) {
      status = name;
      paintSoon();
    },
  });
  const dials = new Dials((settings) => client.configure(settings));

  // many messages, one picture
  function paintSoon() {
    if (painted) requestAnimationFrame(paint);
    painted = false;
  }

  function paint() {
    painted = true;
    const { state } = client;
    if (state.notice !== notice) {
      notice = state.notice;
      tell(notice?.message ?? "", notice?.fatal);
    }
    rows.render(state.segments, codeOf(state.settings.target));
    byId("empty").hidden = state.segments.length > 0;
    byId("model").textContent = state.model;
    dials.render(state.settings);
    renderGauges(state);
    const [word, sentence] = STATUS[status];
    byId("status").textContent = word;
    byId("dot").className = `dot ${status}`;
    byId("banner").textContent = [sentence, told].filter(Boolean).join(" ");
    byId("banner").hidden = !(sentence || told);
  }

  function tell(message, lasting = false) {
    told = message;
    forget();
    forget = message && !lasting ? after(NOTICE_MS, () => tell("")) : () => {};
    paintSoon();
  }

  startInput(client, tell);
  startHistory(client, tell);
  byId("measure").addEventListener("click", () => client.measure());

  const wide = matchMedia("(min-width: 60rem)");
  const unfold = () => (byId("side").open = wide.matches);
  wide.addEventListener("change", unfold);
  unfold();

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    client.wake();
    client.connection.hurry();
  });
  addEventListener("online", () => client.connection.hurry());
  // a page that nobody looks at may be closed by the server when it is silent
  setInterval(() => document.hidden || client.connection.beat(), BEAT_MS);
  client.connection.connect();
}

function startHistory(client, tell) {
  byId("copy").addEventListener("click", async () => {
    await copy(toText(client.state.segments));
    tell("The translation is in the clipboard.");
  });
  for (const button of document.querySelectorAll("[data-format]")) {
    const { format } = button.dataset;
    button.addEventListener("click", () => {
      const { type, make } = FORMATS[format];
      download(`translation.${format}`, type, make(client.state.segments));
    });
  }
  byId("overlay-link").addEventListener("click", async () => {
    const { session } = client.state;
    await copy(String(address("", { view: "overlay", lines: 2, bg: "transparent", session })));
    tell("The link is in the clipboard. Who has it can also speak in this session.");
  });
}

const view = query.get("view") === "overlay" ? "overlay" : "page";
document.documentElement.dataset.view = view;
if (view === "overlay") startOverlay();
else startPage();

// Starts the page: views, theme, API key, the state of the connection.

import { key, setKey } from "./api.js";
import { byId } from "./dom.js";
import { MeshPage } from "./mesh.js";
import { Playground } from "./playground.js";
import { Watch } from "./watch.js";

const THEMES = ["auto", "light", "dark"];
const VIEWS = ["playground", "mesh"];

// ---- views ----

function showView() {
  const named = location.hash.slice(1);
  const current = VIEWS.includes(named) ? named : VIEWS[0];
  for (const view of VIEWS) {
    byId(view).hidden = view !== current;
    if (view === current) byId(`nav-${view}`).setAttribute("aria-current", "page");
    else byId(`nav-${view}`).removeAttribute("aria-current");
  }
  document.title = current === "mesh" ? "Mesh · Weft" : "Weft";
}

// ---- theme ----

function showTheme() {
  const { theme } = document.documentElement.dataset;
  byId("theme-words").textContent = theme;
  byId("theme-button").setAttribute("aria-label", `Theme: ${theme}`);
  byId("theme-button").title = `Theme: ${theme}`;
}

function nextTheme() {
  const { dataset } = document.documentElement;
  dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("weft-theme", dataset.theme);
  } catch {
    // Storage may be forbidden: the choice then holds for this page.
  }
  showTheme();
}

// ---- API key ----

let withKey = [];

function askForKey(then) {
  byId("key-button").hidden = false;
  if (then) withKey.push(then);
  if (byId("key-dialog").open) return;
  byId("key-reason").textContent = key()
    ? "The mesh does not accept this key."
    : "This mesh asks for a key. It is kept in this tab until it is closed.";
  byId("key-input").value = key();
  byId("key-dialog").showModal();
}

function useKey(value) {
  setKey(value.trim());
  byId("key-dialog").close();
  const waiting = withKey;
  withKey = [];
  watch.restart();
  for (const then of waiting) then();
}

// ---- connection ----

const watch = new Watch();

function showConnection() {
  const { snapshot, state } = watch;
  const ready = snapshot?.workers.filter((worker) => worker.phase === "PHASE_READY").length ?? 0;
  const isWhole = snapshot?.scheduler_connected ?? true;
  const words = {
    connecting: "Connecting",
    lost: "Gateway not reachable",
    denied: "API key needed",
    forbidden: "Connected",
    open: isWhole ? `${ready} ${ready === 1 ? "worker" : "workers"}` : "Scheduler not reachable",
  };
  byId("link-state").textContent = words[state];
  byId("link-state").dataset.state = state === "open" && !(isWhole && ready) ? "lost" : state;
  if (state === "denied") askForKey();
}

let served = "";

/** Reads the models again when the mesh serves others. */
function followModels() {
  const ready = watch.snapshot?.workers.filter((worker) => worker.phase === "PHASE_READY") ?? [];
  const names = [...new Set(ready.map((worker) => worker.model))].sort().join();
  if (names === served || watch.state !== "open") return;
  served = names;
  playground.refresh();
}

byId("theme-button").addEventListener("click", nextTheme);
byId("key-button").addEventListener("click", () => askForKey());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-input").value);
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => useKey(""));
window.addEventListener("hashchange", showView);
watch.addEventListener("change", showConnection);
watch.addEventListener("change", followModels);

showView();
showTheme();
if (key()) byId("key-button").hidden = false;
const playground = new Playground(askForKey);
new MeshPage(byId("mesh"), watch);
watch.restart();

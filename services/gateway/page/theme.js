// Applies the chosen theme before the first paint: "auto" follows the system.
(() => {
  let theme = "auto";
  try {
    theme = localStorage.getItem("weft-theme") ?? "auto";
  } catch {
    // Storage may be forbidden: the theme then follows the system.
  }
  document.documentElement.dataset.theme = theme;
})();

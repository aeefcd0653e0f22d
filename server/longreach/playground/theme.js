// A plain script in the head, not a module: the page must not be painted in one theme and then in the other.
(() => {
  const KEY = "longreach-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");

  const saved = localStorage.getItem(KEY);
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = current() === "dark" ? "Light theme" : "Dark theme";
      document.dispatchEvent(new Event("theme"));
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      localStorage.setItem(KEY, root.dataset.theme);
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();

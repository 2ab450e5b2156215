"use strict";
// Everything in the page can be read without this script: it adds sorting, search, a slider,
// copying and a switch of the theme.

const show = (selector) => document.querySelectorAll(selector).forEach((e) => (e.hidden = false));

// Theme: that of the system, until the button is pressed.
const root = document.documentElement;
const themeButton = document.querySelector(".theme");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => (themeButton.textContent = isDark() ? "Light theme" : "Dark theme");
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
prefersDark.addEventListener("change", nameTheme);
nameTheme();
show(".theme, .needs-script, .copy");

// Copy buttons.
const copied = async (text) => {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
};
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.closest("figure").querySelector("code");
    try {
      await copied(code.textContent);
      button.textContent = "Copied";
    } catch {
      window.getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

// Tables: a press on a heading sorts, numbers by value with dashes at the end.
const valueOf = (row, column, numeric) => {
  const text = row.cells[column].textContent.trim();
  if (!numeric) return text;
  const number = parseFloat(text.replace(/[,\s*]/g, ""));
  return Number.isNaN(number) ? null : number;
};
const sortBy = (table, column, heading) => {
  const numeric = heading.classList.contains("cal-n");
  const rising = heading.getAttribute("aria-sort") === "descending" || (!heading.hasAttribute("aria-sort") && !numeric);
  table.querySelectorAll("thead th").forEach((th) => th.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => [valueOf(row, column, numeric), row]);
  const names = new Intl.Collator(undefined, { numeric: true });
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return (numeric ? a - b : names.compare(a, b)) * (rising ? 1 : -1);
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
};
for (const table of document.querySelectorAll(".sortable table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sortBy(table, column, heading));
    heading.replaceChildren(button);
  });
}

// Search in the names of a table.
for (const field of document.querySelectorAll("input[type=search]")) {
  const rows = [...document.getElementById(field.dataset.table).querySelector("tbody").rows];
  const count = document.getElementById(field.dataset.count);
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} shown`;
  });
}

// Slider over thresholds: rows of [threshold as text, share answered, errors among these].
const percent = (value, digits) => `${(100 * value).toFixed(digits)} %`;
for (const box of document.querySelectorAll(".slider")) {
  const points = JSON.parse(box.querySelector("script").textContent);
  const input = box.querySelector("input");
  const [right, wrong] = box.querySelectorAll(".stack i");
  const update = () => {
    const [threshold, coverage, error] = points[input.value];
    box.querySelector("[data-value=answered]").textContent = percent(coverage, 1);
    box.querySelector("[data-value=wrong]").textContent = percent(error, 2);
    box.querySelector("[data-value=threshold]").textContent = threshold;
    box.querySelector("[data-value=left]").textContent = percent(1 - coverage, 1);
    right.style.width = `${100 * coverage * (1 - error)}%`;
    wrong.style.width = `${100 * coverage * error}%`;
    input.setAttribute("aria-valuetext", `${percent(coverage, 1)} answered, ${percent(error, 2)} of these wrong`);
  };
  input.addEventListener("input", update);
  update();
}

// Print everything; a link into closed details opens them.
let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => (details.open = true));
});
window.addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let box = target; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
  if (target) target.scrollIntoView();
};
window.addEventListener("hashchange", reveal);
reveal();

// The page is a row of views, of which one is shown. Text of any origin is set as text, never as
// markup, and every request goes to the server that sent the page.
"use strict";

const settings = document.querySelector("meta[name=calibrant]").dataset;
const limit = Number(settings.limit);
const suffixes = settings.suffixes.split(",");
const POLL = 300; // milliseconds between two questions about a job

const STAGES = { file: 0, busy: 0, choose: 1, run: 2, done: 3 };
const DOWNLOADS = {
  "report.html": ["Report", "HTML"],
  "report.md": ["Report", "Markdown"],
  "report.json": ["Report", "JSON"],
  "calibrator.safetensors": ["Calibrator", "safetensors"],
  "calibrator.onnx": ["Calibrator", "ONNX"],
};

const state = { file: null, found: null, job: null, request: null, turn: 0 };

const $ = (id) => document.getElementById(id);

// ------------------------------------------------------------------ elements and numbers

function element(tag, text = "", properties = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, properties);
}

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

function bytes(size) {
  if (size < 1e3) return `${size}\u00a0bytes`;
  if (size < 1e6) return `${(size / 1e3).toFixed(0)}\u00a0kB`;
  return `${(size / 1e6).toFixed(size < 1e7 ? 1 : 0)}\u00a0MB`;
}

const count = (number) => number.toLocaleString("en-US");

// ------------------------------------------------------------------ views

function show(view, message = "") {
  for (const section of document.querySelectorAll("main > section")) {
    section.hidden = section.id !== `view-${view}`;
  }
  document.body.dataset.view = view;
  const stage = STAGES[view];
  if (stage !== undefined) {
    document.querySelectorAll(".stages li").forEach((item, i) => {
      item.className = i < stage ? "over" : "";
      if (i === stage) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    });
  }
  $("status").textContent = message;
  window.scrollTo(0, 0);
  const heading = document.querySelector(`#view-${view} h1`);
  if (heading && document.readyState === "complete") heading.focus({ preventScroll: true });
}

function name(text) {
  for (const place of document.querySelectorAll(".file-name")) place.textContent = text;
}

function fail(text, { title = "That did not work", help = false } = {}) {
  $("error-title").textContent = title;
  $("error-text").textContent = text;
  $("retry").hidden = !state.found;
  $("error-help").hidden = !help;
  show("error");
}

function restart() {
  if (state.request) state.request.abort();
  if (state.job) post(`/api/jobs/${state.job}/stop`).catch(() => {});
  Object.assign(state, { file: null, found: null, job: null, request: null, turn: state.turn + 1 });
  $("file").value = "";
  $("report").removeAttribute("src");
  history.replaceState(null, "", "/");
  show("file");
}

// ------------------------------------------------------------------ requests

const GONE = "The server does not answer. Start it again with calibrant ui, and open the address it prints.";

async function answer(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error(GONE);
  }
  return checked(response.status, await response.text());
}

function checked(status, text) {
  let content = {};
  try {
    content = JSON.parse(text);
  } catch {
    content = { error: text };
  }
  if (status >= 400) throw new Error(content.error || `The server answered with status ${status}.`);
  return content;
}

function post(path, content = {}) {
  return answer(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-calibrant-token": settings.token },
    body: JSON.stringify(content),
  });
}

// With fetch there is no progress of what is sent.
function send(file) {
  return new Promise((resolve, reject) => {
    const request = (state.request = new XMLHttpRequest());
    request.open("POST", "/api/files");
    request.setRequestHeader("x-calibrant-token", settings.token);
    request.setRequestHeader("x-file-name", encodeURIComponent(file.name));
    request.setRequestHeader("content-type", "application/octet-stream");
    request.upload.onprogress = (event) => sent(event.loaded, event.total);
    request.onerror = () => reject(new Error(GONE));
    request.onload = () => {
      try {
        resolve(checked(request.status, request.responseText));
      } catch (problem) {
        reject(problem);
      }
    };
    request.send(file);
  });
}

// Calls back with each state of a job, until it is over or the user has turned to something else.
async function follow(job, callback) {
  const turn = state.turn;
  state.job = job;
  for (;;) {
    const told = await answer(`/api/jobs/${job}`);
    if (turn !== state.turn) return null;
    callback(told);
    if (!["waiting", "running"].includes(told.state)) {
      state.job = null;
      return told;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

async function attempt(action) {
  const turn = state.turn;
  try {
    await action();
  } catch (problem) {
    if (turn === state.turn) fail(problem.message);
  }
}

// ------------------------------------------------------------------ the file

function sent(done, total) {
  $("sent").max = total;
  $("sent").value = done;
  $("busy-note").textContent = `${bytes(done)} of ${bytes(total)}`;
}

function busy(title, note = "") {
  $("busy-title").textContent = title;
  $("busy-note").textContent = note;
  $("sent").removeAttribute("value");
  show("busy", title);
}

function take(files) {
  if (!files.length) return;
  if (files.length > 1) {
    fail("Drop one file at a time. For a folder of shards, use calibrant report and calibrant fit.");
    return;
  }
  const [file] = files;
  name(file.name);
  if (file.size > limit) {
    fail(
      `${file.name} has ${bytes(file.size)}, and this page takes up to ${bytes(limit)}. Start it with a ` +
        "larger --max-upload, or use calibrant report and calibrant fit.",
      { title: "The file is too large" },
    );
    return;
  }
  attempt(async () => {
    busy("Sending the file");
    await looked(await send(file));
  });
}

async function looked(upload) {
  state.request = null;
  state.file = upload.file;
  name(upload.name);
  busy("Reading the file");
  const told = await follow(upload.job, (told) => {
    $("busy-note").textContent = told.state === "waiting" ? "Another job is running." : "";
  });
  if (!told) return;
  if (told.state !== "done") {
    fail(told.error, { title: "This file cannot be read", help: true });
    return;
  }
  state.found = told.result;
  choose(upload);
}

// ------------------------------------------------------------------ the choices

function choose(upload) {
  const found = state.found;
  const what = found.multilabel ? `${count(found.classes)} tags` : `${count(found.classes)} classes`;
  $("facts").textContent = `${what}, ${bytes(upload.size)}`;
  $("features").hidden = found.splits.every((split) => split.features === null);
  $("splits").replaceChildren(...found.splits.map(splitRow));
  const names = found.class_names;
  $("names").hidden = !names.length;
  $("names").textContent = `${found.multilabel ? "Tags" : "Classes"}: ${names.join(", ")}${found.classes > names.length ? " …" : ""}`;
  $("method").replaceChildren(...found.methods.map(methodOption));
  $("class-1").textContent = names.length === 2 ? `Class 1, ${names[1]}` : "Class 1";
  $("estimand-field").hidden = found.multilabel || found.classes !== 2;
  $("split-fields").hidden = found.splits.length < 2;
  fillSplits($("fit-split"), found.fit_split);
  fillSplits($("test-split"), found.test_split);
  chosen();
  show("choose");
}

const title = (split) => split.name || "all examples";

function splitRow(split) {
  const row = element("tr");
  const features = split.features === null ? "none" : `${count(split.features)} per example`;
  const hidden = $("features").hidden;
  row.append(
    element("td", title(split)),
    element("td", count(split.examples), { className: "number" }),
    element("td", split.domain === "probs" ? "probabilities" : "logits"),
    element("td", features, { hidden }),
  );
  return row;
}

function methodOption(method) {
  const usual = method === state.found.methods[0] ? " (recommended)" : "";
  const title = method.name === method.title.toLowerCase() ? "" : `: ${method.title}`;
  return element("option", `${method.name}${title}${usual}`, { value: method.name });
}

function fillSplits(select, preferred) {
  const options = state.found.splits.map((s) => element("option", title(s), { value: s.name }));
  if (preferred === null) options.unshift(element("option", "Choose a split", { value: "?" }));
  select.replaceChildren(...options);
  select.value = preferred === null ? "?" : preferred;
}

function chosen() {
  const found = state.found;
  const method = found.methods.find((one) => one.name === $("method").value);
  $("method-note").textContent = `${method.summary[0].toUpperCase()}${method.summary.slice(1)}.`;
  $("keep-note").textContent = $("keep").checked
    ? "Confidence changes and accuracy stays."
    : "Some predictions change if that makes clearly more of them right.";
  $("keep-field").hidden = method.name !== "auto" || found.multilabel || found.classes < 3;
  const same = $("fit-split").value === $("test-split").value;
  $("split-note").textContent = same && $("fit-split").value !== "?"
    ? "Figures that are fitted and measured on the same examples look too good: the report measures each with fits on the others."
    : "";
}

function choices() {
  const found = state.found;
  const several = !$("split-fields").hidden;
  const estimand = document.querySelector("input[name=estimand]:checked").value;
  return {
    file: state.file,
    method: $("method").value,
    fit_split: several ? $("fit-split").value : null,
    test_split: several ? $("test-split").value : null,
    estimand: found.multilabel ? "multilabel" : $("estimand-field").hidden ? "auto" : estimand,
    keep_argmax: $("keep-field").hidden || !$("keep").checked ? "auto" : true,
  };
}

function checkSplits() {
  const undecided = [$("fit-split"), $("test-split")].find((select) => select.value === "?");
  const visible = undecided && !$("split-fields").hidden;
  for (const select of [$("fit-split"), $("test-split")]) select.setCustomValidity("");
  if (visible) {
    undecided.setCustomValidity("Choose a split of the file.");
    undecided.reportValidity();
  }
  return !visible;
}

// ------------------------------------------------------------------ the work

async function run() {
  const chosen = choices();
  const { job } = await post("/api/jobs", chosen);
  $("plan").textContent = `, ${chosen.method}${chosen.fit_split ? `, fitted on ${chosen.fit_split}` : ""}`;
  await watch(job);
}

async function watch(job) {
  history.replaceState(null, "", `#job-${job}`);
  $("steps").replaceChildren();
  show("run", "Calibrating");
  const told = await follow(job, running);
  if (!told) return;
  if (told.state === "done") done(told);
  else if (told.state === "failed") fail(told.error);
  else if (state.found) show("choose", "Stopped");
  else restart();
}

function running(told) {
  name(told.name); // which is not known after a reload
  const list = $("steps");
  if (list.children.length !== told.steps.length) {
    list.replaceChildren(...told.steps.map((text) => element("li", text)));
  }
  [...list.children].forEach((item, i) => {
    const now = i === told.step && told.state === "running";
    if (now && item.className !== "now") $("status").textContent = told.steps[i];
    item.className = i < told.step || told.state === "done" ? "over" : now ? "now" : "";
    bar(item, told.steps[i], now ? told.progress : null);
  });
  const waiting = told.state === "waiting";
  $("elapsed").textContent = waiting ? "Waiting for another job." : `${Math.round(told.seconds)} s`;
}

function bar(item, text, progress) {
  let shown = item.querySelector("progress");
  if (!progress) {
    if (shown) shown.remove();
    return;
  }
  if (!shown) {
    shown = element("progress");
    shown.setAttribute("aria-label", text);
    item.append(shown);
  }
  [shown.value, shown.max] = progress;
}

// ------------------------------------------------------------------ the report

function done(told) {
  const report = `/results/${told.id}/report.html`;
  $("open").href = report;
  $("report").src = report;
  const files = Object.entries(told.files).map(([file, size]) => download(told.id, file, size));
  if (told.result.no_onnx) {
    files.push(element("p", `No ONNX file: ${told.result.no_onnx}`, { className: "missing" }));
  }
  $("downloads").replaceChildren(...files);
  $("lines").replaceChildren(...told.result.lines.map((line) => element("p", line)));
  $("notes").replaceChildren(
    ...told.result.notes.map((note) => element("p", note, { className: "warning" })),
  );
  $("inputs").textContent = told.result.needs_features ? "logits, features" : "logits";
  $("again").hidden = !state.found;
  show("done", "The report is ready");
}

function download(job, file, size) {
  const [title, kind] = DOWNLOADS[file];
  const link = element("a", "", { className: "download", href: `/results/${job}/${file}?download`, download: file });
  link.append(
    icon("M12 4v11m-5-5 5 5 5-5M5 20h14"),
    element("strong", title),
    element("span", `${kind}, ${bytes(size)}`),
  );
  return link;
}

// ------------------------------------------------------------------ events

function dragging(event) {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault(); // also beside the zone, where the browser would open the file instead
  document.body.classList.toggle("dragging", event.type !== "drop" && !$("view-file").hidden);
}

function start() {
  const kinds = `${suffixes.slice(0, -1).join(", ")} or ${suffixes.at(-1)}`;
  $("formats").textContent = `${kinds}, up to ${bytes(limit)}`;
  $("file").accept = suffixes.join(",");
  $("file").addEventListener("change", () => take($("file").files));
  for (const type of ["dragenter", "dragover", "drop"]) window.addEventListener(type, dragging);
  window.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dragging");
  });
  window.addEventListener("drop", (event) => {
    if (!$("view-file").hidden) take(event.dataTransfer.files);
  });
  $("sample").addEventListener("click", () => attempt(async () => {
    name("");
    busy("Reading the sample");
    await looked(await post("/api/sample"));
  }));
  $("choices").addEventListener("change", () => { checkSplits(); chosen(); });
  $("choices").addEventListener("submit", (event) => {
    event.preventDefault();
    if (checkSplits()) attempt(run);
  });
  $("stop").addEventListener("click", () => attempt(() => post(`/api/jobs/${state.job}/stop`)));
  for (const id of ["again", "retry"]) $(id).addEventListener("click", () => show("choose"));
  for (const button of document.querySelectorAll("[data-action=restart]")) {
    button.addEventListener("click", restart);
  }
  const job = location.hash.match(/^#job-([0-9a-f]{16})$/);
  history.replaceState(null, "", job ? `/${job[0]}` : "/"); // the token is in a cookie by now
  if (job) watch(job[1]).catch(restart);
}

start();

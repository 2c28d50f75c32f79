// Search, sorting, filters, the driver question, copy buttons.  Every page is whole without it.
"use strict";

const $ = (id) => document.getElementById(id);

// -- the driver question: the same rules as driver.py, held to it by tests/browser ------------

/** Compare two dotted versions as numbers: negative, zero or positive. */
function compare(a, b) {
  const left = a.split(".").map(Number);
  const right = b.split(".").map(Number);
  for (let i = 0; i < Math.max(left.length, right.length); i++) {
    const difference = (left[i] || 0) - (right[i] || 0);
    if (difference) return difference;
  }
  return 0;
}

/** What was read off nvidia-smi: {kind, version}, or null. */
function parseAsked(text) {
  const words = text.match(/(?<![\w.])(?<!\d,)\d+(?:\.\d+)*(?!\w|[.,]\w)/g) || [];
  const driver = words.find((word) => /^\d{3}(\.\d+){0,2}$/.test(word));
  if (driver) return { kind: "driver", version: driver };
  const cuda = words.find((word) => /^\d{1,2}(\.\d{1,2})?$/.test(word));
  return cuda ? { kind: "cuda", version: cuda } : null;
}

/** Does an image with this CUDA level and driver floor run there?  "runs", "floor" or "no". */
function answerFor(level, floor, asked) {
  if (!level || !floor) return "runs";
  if (asked.kind === "driver") return compare(asked.version, floor) >= 0 ? "runs" : "no";
  if (compare(asked.version, level) >= 0) return "runs";
  return asked.version.split(".")[0] === level.split(".")[0] ? "floor" : "no";
}

// -- the table --------------------------------------------------------------------------------

function setUpTable(table) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows, (element) => ({
    element,
    text: element.textContent.toLowerCase().replace(/\s+/g, " "),
    answer: "runs",
  }));
  let asked = null;

  function show() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = ["cuda", "variant", "status"].map((name) => [name, $(name).value]);
    let shown = 0;
    for (const row of rows) {
      const data = row.element.dataset;
      const fits =
        words.every((word) => row.text.includes(word)) &&
        wanted.every(([name, value]) => value === "*" || data[name] === value) &&
        row.answer !== "no";
      row.element.hidden = !fits;
      shown += fits;
    }
    $("count").textContent = `${shown} of ${rows.length} shown`;
    $("nothing").hidden = shown > 0;
  }

  function ask(text) {
    asked = parseAsked(text);
    const wrong = text.trim() !== "" && asked === null;
    $("smi").setAttribute("aria-invalid", String(wrong));
    const count = { runs: 0, floor: 0, no: 0 };
    for (const row of rows) {
      const { cuda, floor } = row.element.dataset;
      row.answer = asked ? answerFor(cuda, floor, asked) : "runs";
      count[row.answer] += 1;
      row.element.classList.toggle("floor", row.answer === "floor");
    }
    $("forget").hidden = asked === null;
    $("answer").textContent = asked ? told(count) : wrong ? refused(text) : "";
    show();
  }

  function refused(text) {
    return `“${text.trim()}” is no CUDA version like 12.2 and no driver version like 535.104.`;
  }

  function told(count) {
    const name = asked.kind === "cuda" ? "CUDA" : "driver";
    const runs = count.runs === 1 ? "1 image runs" : `${count.runs} images run`;
    const built = rows.filter((row) => row.answer === "runs" && row.element.dataset.status !== "missing").length;
    const parts = [`With ${name} ${asked.version}, ${runs}; built so far: ${built}.`];
    if (count.floor) {
      parts.push(`${count.floor} more, marked “check driver”, need the Driver Version in their column Driver.`);
    }
    if (count.no) parts.push(count.no === 1 ? "1 does not run and is hidden." : `${count.no} do not run and are hidden.`);
    return parts.join(" ");
  }

  // Some browsers tell of a select by "change" only.
  for (const kind of ["input", "change"]) $("filters").addEventListener(kind, show);
  $("filters").addEventListener("reset", () => setTimeout(show));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask($("smi").value);
  });
  $("forget").addEventListener("click", () => {
    $("smi").value = "";
    ask("");
    $("smi").focus();
  });
  addSorting(table, body, rows);
  show();
}

function addSorting(table, body, rows) {
  const collator = new Intl.Collator("en", { numeric: true });
  const headers = Array.from(table.tHead.rows[0].cells);

  /** What a cell is sorted by; "" for what is not there, which always comes last. */
  function key(row, column) {
    const cell = row.element.cells[column];
    if (cell.dataset.v !== undefined) return cell.dataset.v;
    return cell.classList.contains("none") ? "" : cell.textContent.trim();
  }

  function sort(column, descending) {
    const keyed = rows.map((row, index) => ({ row, index, key: key(row, column) }));
    keyed.sort((a, b) => {
      if ((a.key === "") !== (b.key === "")) return a.key === "" ? 1 : -1;
      const order = collator.compare(a.key, b.key);
      return (descending ? -order : order) || a.index - b.index;
    });
    body.append(...keyed.map((item) => item.row.element));
  }

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = header.getAttribute("aria-sort") === "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(column, descending);
    });
  });
}

// -- copy buttons -----------------------------------------------------------------------------

function addCopyButtons() {
  if (!navigator.clipboard) return;
  for (const figure of document.querySelectorAll("figure.command")) {
    const what = figure.querySelector("figcaption").textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy: ${what}`);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(figure.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select it by hand";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    figure.append(button);
  }
}

// -- what scrolls sideways can be reached by keyboard; what does not is no stop for the Tab key -----

function watchScrolling() {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const scrolls = target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight;
      if (scrolls && getComputedStyle(target).overflowX !== "visible") {
        target.tabIndex = 0;
        target.setAttribute("role", "region");
        target.setAttribute("aria-label", target.dataset.label);
      } else {
        for (const name of ["tabindex", "role", "aria-label"]) target.removeAttribute(name);
      }
    }
  });
  document.querySelectorAll("[data-label]").forEach((element) => observer.observe(element));
}

document.querySelectorAll(".needs-js").forEach((element) => (element.hidden = false));
if ($("images")) setUpTable($("images"));
addCopyButtons();
watchScrolling();

"use strict";
// The page is whole without this: it lets a table be sorted by its heads, and a command be copied.
for (const table of document.querySelectorAll("table.results")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const rises = now ? now === "descending" : head.dataset.first === "rising";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rises ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.v;
      const order = (a, b) => (column ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b)));
      const rows = [...body.rows];
      const known = rows.filter((row) => value(row) !== "");
      known.sort((a, b) => (rises ? order(a, b) : order(b, a)));
      body.append(...known, ...rows.filter((row) => value(row) === ""));  // what is not known comes last
    });
  });
}
for (const command of document.querySelectorAll(".command")) {
  const code = command.querySelector("code");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  command.append(button);
}

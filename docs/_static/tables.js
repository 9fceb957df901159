// Marks tables that have sentences in their cells, and tells each cell its column's heading: see wide.css.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const rows = [...table.querySelectorAll("tbody tr")].map((row) => [...row.cells]);
    if (headings.length < 2 || !rows.flat().some((cell) => cell.textContent.length > 40)) continue;
    table.classList.add("sentences");
    for (const row of rows) row.forEach((cell, column) => { cell.dataset.heading = headings[column]; });
    for (const cell of rows.flat()) if (!cell.textContent.trim()) cell.replaceChildren();
  }
});

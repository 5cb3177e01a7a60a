// Makes a table sortable by its columns. `key` returns the number or text by which a cell is sorted.
function sortable(table, rows, key) {
  "use strict";
  var collator = new Intl.Collator("en", { numeric: true });
  Array.from(table.tHead.rows[0].cells).forEach(function (head, column, heads) {
    var button = document.createElement("button");
    button.type = "button";
    button.append.apply(button, Array.from(head.childNodes));
    head.append(button);
    button.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      var keys = new Map(rows.map(function (row) { return [row, key(row.cells[column].textContent.trim())]; }));
      table.tBodies[0].append.apply(table.tBodies[0], rows.slice().sort(function (a, b) {
        var left = keys.get(a), right = keys.get(b);
        return sign * (typeof left === "number" && typeof right === "number" ? left - right : collator.compare(left, right));
      }));
    });
  });
}

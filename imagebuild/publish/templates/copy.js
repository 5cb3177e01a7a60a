// Copies commands. A page without a secure context has no clipboard, but can copy what is selected.
(function () {
  "use strict";
  function announce(button, text) {
    var old = button.dataset.label || button.innerHTML;
    button.dataset.label = old;
    button.textContent = text;
    setTimeout(function () { button.innerHTML = old; }, 1500);
  }
  function select(node) {
    var range = document.createRange(), selection = window.getSelection();
    range.selectNodeContents(node);
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest && event.target.closest("button.copy");
    if (!button) { return; }
    var node = button.parentNode.querySelector("code");
    function copySelection() { announce(button, select(node) ? "Copied" : "Selected"); }
    if (navigator.clipboard && window.isSecureContext) {
      navigator.clipboard.writeText(node.textContent).then(function () { announce(button, "Copied"); }, copySelection);
    } else { copySelection(); }
  });
  function show() { document.querySelectorAll("button.copy").forEach(function (button) { button.hidden = false; }); }
  document.addEventListener("DOMContentLoaded", show);
})();

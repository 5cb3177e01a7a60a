// Draws the charts of the page. Colours of text and grids come from the style sheet, so light, dark and paper need nothing here.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
  var config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  if (coarse) { config.displayModeBar = false; }

  function chart(button) { return document.getElementById(button.dataset.chart); }

  Object.keys(figures).forEach(function (id) {
    var layout = Object.assign({
      autosize: true, font: font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      // A finger on a chart scrolls the page.
      dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: "#1b2330", bordercolor: "#1b2330", font: { color: "#ffffff", family: font.family } }
    }, figures[id].layout);
    Plotly.newPlot(id, figures[id].data, layout, config);
  });

  document.querySelectorAll(".legend button").forEach(function (button) {
    button.addEventListener("click", function () {
      var shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      Plotly.restyle(chart(button), { visible: shown }, [Number(button.dataset.trace)]);
    });
  });
  document.querySelectorAll("button.scale").forEach(function (button) {
    button.addEventListener("click", function () {
      var linear = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(linear));
      Plotly.relayout(chart(button), linear
        ? { "yaxis.type": "linear", "yaxis.dtick": null, "yaxis.rangemode": "tozero", "yaxis.autorange": true }
        : { "yaxis.type": "log", "yaxis.dtick": 1, "yaxis.rangemode": "normal", "yaxis.autorange": true });
    });
  });

  // Paper is narrower than most screens, and what is folded cannot be opened on it.
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.from(document.querySelectorAll("details.data:not([open])"));
    opened.forEach(function (details) { details.open = true; });
    Object.keys(figures).forEach(function (id) { Plotly.relayout(id, { autosize: false, width: 660 }); });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (details) { details.open = false; });
    Object.keys(figures).forEach(function (id) { Plotly.relayout(id, { autosize: true, width: null }); });
  });
})();

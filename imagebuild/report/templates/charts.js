// Draws the charts of a page. Colours of text and grids come from the style sheet, so light, dark and paper need nothing here.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var coarse = window.matchMedia("(pointer: coarse)").matches, drawn = [];
  var font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
  var config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  if (coarse) { config.displayModeBar = false; }

  function chart(button) { return document.getElementById(button.dataset.chart); }

  // On a phone there is room for few of the sizes, and for numbers in cells of few columns only.
  function fit(figure, width) {
    var axis = figure.layout.xaxis, trace = figure.data[0];
    if (axis.tickvals) {
      var step = Math.ceil(axis.tickvals.length / Math.max(2, Math.floor((width - 72) / 56)));
      axis.tickvals = axis.tickvals.filter(function (_, i) { return i % step === 0; });
      axis.ticktext = axis.ticktext.filter(function (_, i) { return i % step === 0; });
    }
    if (trace && trace.type === "heatmap" && (width - 110) / trace.x.length < 24) { trace.texttemplate = ""; }
  }

  // A chart that is not shown has no width. It is drawn when the address names what it is in.
  function draw() {
    Object.keys(figures).forEach(function (id) {
      var width = document.getElementById(id).clientWidth;
      if (!width || drawn.indexOf(id) >= 0) { return; }
      drawn.push(id);
      var layout = Object.assign({
        autosize: true, font: font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        // A finger on a chart scrolls the page.
        dragmode: coarse ? false : "zoom",
        modebar: { bgcolor: "rgba(0,0,0,0)", color: "#7d8896", activecolor: "#2f7ed8" },
        hoverlabel: { bgcolor: "#1b2330", bordercolor: "#1b2330", font: { color: "#ffffff", family: font.family } }
      }, figures[id].layout);
      fit(figures[id], width);
      Plotly.newPlot(id, figures[id].data, layout, config);
    });
  }
  draw();
  ["load", "hashchange"].forEach(function (event) { window.addEventListener(event, draw); });

  document.querySelectorAll(".legend button").forEach(function (button) {
    button.addEventListener("click", function () {
      var shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      Plotly.restyle(chart(button), { visible: shown }, [Number(button.dataset.trace)]);
    });
  });
  document.querySelectorAll("button.scale").forEach(function (button) {
    var range = figures[button.dataset.chart].layout.yaxis.range;
    button.addEventListener("click", function () {
      var linear = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(linear));
      Plotly.relayout(chart(button), linear
        ? { "yaxis.type": "linear", "yaxis.tickmode": "auto", "yaxis.range": [0, 0.56 * Math.pow(10, range[1])] }
        : { "yaxis.type": "log", "yaxis.tickmode": "array", "yaxis.range": range.slice() });
    });
  });

  // Paper is narrower than most screens.
  window.addEventListener("beforeprint", function () {
    drawn.forEach(function (id) { Plotly.relayout(id, { autosize: false, width: id.indexOf("matrix") ? 660 : 330 }); });
  });
  window.addEventListener("afterprint", function () {
    drawn.forEach(function (id) { Plotly.relayout(id, { autosize: true, width: null }); });
  });
})();

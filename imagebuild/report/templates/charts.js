// Draws the charts of a page. Colours of text and grids come from the style sheet, so light, dark and paper need nothing here.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
  var config = { responsive: true, displaylogo: false, displayModeBar: !coarse && "hover" };

  // On a phone there is room for few of the sizes, and for numbers in cells of few columns only.
  function fit(figure, width) {
    var axis = figure.layout.xaxis, trace = figure.data[0];
    if (axis.tickvals) {
      var step = Math.ceil(axis.tickvals.length / Math.max(2, Math.floor((width - 72) / 56)));
      axis.tickvals = axis.tickvals.filter(function (_, i) { return i % step === 0; });
      axis.ticktext = axis.ticktext.filter(function (_, i) { return i % step === 0; });
    }
    if (trace.type === "heatmap" && (width - 110) / trace.x.length < 24) { trace.texttemplate = ""; }
  }

  Object.keys(figures).forEach(function (id) {
    // A finger on a chart scrolls the page.
    var layout = { autosize: true, font: font, paper_bgcolor: "transparent", plot_bgcolor: "transparent", dragmode: coarse ? false : "zoom" };
    fit(figures[id], document.getElementById(id).clientWidth);
    Plotly.newPlot(id, figures[id].data, Object.assign(layout, figures[id].layout), config);
  });

  // Paper is narrower than most screens.
  window.addEventListener("beforeprint", function () {
    Object.keys(figures).forEach(function (id) { Plotly.relayout(id, { autosize: false, width: id.indexOf("matrix") ? 660 : 330 }); });
  });
  window.addEventListener("afterprint", function () {
    Object.keys(figures).forEach(function (id) { Plotly.relayout(id, { autosize: true, width: null }); });
  });
})();

// Draws the charts of a page. The style sheet sets the colours of text and grids for light, dark and print.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
  var config = { responsive: true, displaylogo: false, displayModeBar: !coarse && "hover" };

  // A narrow screen has room for only a few size labels, and for numbers in cells only if there are few columns.
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

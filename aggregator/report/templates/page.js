// Draws every plot of the page. A figure names its colours as variables of the style sheet, `var(--c1)`: they are looked
// up here, and once more when the reader changes to a dark page or prints.
(() => {
  const touch = matchMedia("(pointer: coarse)").matches;
  const axis = {
    automargin: true, zeroline: false, gridcolor: "var(--grid)", linecolor: "var(--soft)", ticks: "",
    title: { font: { color: "var(--soft)", size: 13 }, standoff: 8 },
  };
  const base = {
    colorway: ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)"],
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif", size: 13,
      color: "var(--ink)" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 12, t: 8, b: 8, pad: 4 },
    xaxis: axis, yaxis: axis,
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { color: "var(--soft)" } },
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--soft)", font: { color: "var(--ink)" }, namelength: -1 },
    modebar: { bgcolor: "var(--card)", color: "var(--soft)", activecolor: "var(--ink)" },
    // a finger scrolls the page; it zooms by the buttons
    dragmode: touch ? false : "zoom",
  };
  const zoom = ["pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  const config = {
    responsive: true, displaylogo: false, displayModeBar: touch ? true : "hover",
    modeBarButtons: touch ? [zoom] : [["toImage"], ["zoom2d", ...zoom]],
  };

  function draw() {
    if (!window.Plotly) return;
    const style = getComputedStyle(document.documentElement);
    const colored = (text) => JSON.parse(text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()));
    for (const div of document.querySelectorAll(".plot")) {
      const figure = colored(div.nextElementSibling.textContent);
      figure.layout.template = { layout: colored(JSON.stringify(base)) };
      Plotly.react(div, figure.data, figure.layout, config);
    }
  }

  // Plotly's code is compressed in the page; the content security policy knows its digest.
  async function unpacked(element) {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.body.append(script);
  }

  const packed = document.getElementById("plotly");
  if (packed) unpacked(packed).then(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const [event, paper] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { document.documentElement.classList.toggle("paper", paper); draw(); });
  }
  addEventListener("toggle", (event) => event.target.open && draw(), true);
  function unfold() {
    document.getElementById(location.hash.slice(1))?.querySelector(":scope > details")?.setAttribute("open", "");
  }
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => document.querySelectorAll("section > details").forEach((each) => { each.open = true; }));
  unfold();
})();

/** The times between tokens as small bars, oldest first. */

const BARS = 60;
const HEIGHT = 28;
const SVG = "http://www.w3.org/2000/svg";

export class Sparkline {
  constructor(label) {
    this.node = document.createElementNS(SVG, "svg");
    this.node.setAttribute("viewBox", `0 0 ${BARS * 3} ${HEIGHT}`);
    this.node.setAttribute("class", "sparkline");
    this.node.setAttribute("role", "img");
    this.node.setAttribute("aria-label", label);
    this.path = document.createElementNS(SVG, "path");
    this.node.append(this.path);
  }

  /** Draw the last of `values`; the largest of them is as high as the picture. */
  draw(values) {
    const shown = values.slice(-BARS);
    const largest = Math.max(...shown, Number.MIN_VALUE);
    const bars = shown.map((value, i) => `M${i * 3 + 1} ${HEIGHT}v${-Math.max((value / largest) * HEIGHT, 1)}`);
    this.path.setAttribute("d", bars.join(""));
  }
}

/** A picture of which keys (across) each query (down) sees. */

/** Draw `grid`, rows of percentages, one cell a pixel; what comes after the query is left empty. */
export function drawMask(canvas, grid) {
  const size = grid.length;
  canvas.width = grid[0].length;
  canvas.height = size;
  const style = getComputedStyle(canvas);
  const seen = rgb(style.color);
  const skipped = rgb(style.borderTopColor); // a border of no width: the style sheet gives it for this picture
  const picture = new ImageData(canvas.width, size);
  grid.forEach((row, i) => {
    row.forEach((value, j) => {
      const place = (i * canvas.width + j) * 4;
      const isPast = (j + 1) / canvas.width <= (i + 1) / size + 1e-9;
      const share = value / 100;
      for (let c = 0; c < 3; c++) picture.data[place + c] = skipped[c] + (seen[c] - skipped[c]) * share;
      picture.data[place + 3] = isPast || value > 0 ? 255 : 0;
    });
  });
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

const rgb = (color) => color.match(/[\d.]+/g).slice(0, 3).map(Number);

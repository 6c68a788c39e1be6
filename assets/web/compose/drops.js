// Files that are dropped anywhere on the page.

/**
 * @param {HTMLElement} element shows by the class `dropping` that they can be let go
 * @param {(files: Iterable<File>) => void} take
 */
export function takeDrops(element, take) {
  const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
  let depth = 0;
  const mark = (/** @type {number} */ change) => {
    depth = Math.max(depth + change, 0);
    element.classList.toggle("dropping", depth > 0);
  };
  element.addEventListener("dragenter", (event) => hasFiles(event) && mark(1));
  element.addEventListener("dragleave", (event) => hasFiles(event) && mark(-1));
  element.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  element.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(-depth);
    take(event.dataTransfer?.files ?? []);
  });
}

// A photo or a clip from the machine's camera.

import { button, h, showDialog } from "../common/dom.js";
import { t } from "../common/words.js";

const CLIP_TYPES = ["video/mp4", "video/webm;codecs=vp9", "video/webm"];

/**
 * A file that was shot, or null.
 * @returns {Promise<File | null>}
 */
export function takePicture() {
  return new Promise((resolve) => {
    /** @type {MediaStream | null} */
    let stream = null;
    /** @type {MediaRecorder | null} */
    let recorder = null;
    const view = h("video", { autoplay: true, muted: true, playsInline: true });
    const words = h("p", { role: "status" }, t("Waiting for the camera"));
    const take = (/** @type {File} */ file) => {
      resolve(file);
      dialog.close();
    };
    const shoot = button("strong", t("Take a photo"), async () => take(await photo(view)), { disabled: true });
    const onRecord = () => {
      if (recorder) return recorder.stop();
      if (stream) recorder = clip(stream, take);
      record.textContent = t("Stop recording");
      words.textContent = t("Recording");
      shoot.disabled = true;
    };
    const record = button("plain", t("Record a clip"), onRecord, { disabled: true });
    const close = button("plain", t("Close"), () => dialog.close());
    const buttons = h("div.dialog-buttons.row.wrap.end", shoot, record, close);
    const dialog = h("dialog.dialog.card", { "aria-label": t("Camera") }, view, words, buttons);
    showDialog(dialog);
    dialog.addEventListener("close", () => {
      end(stream);
      resolve(null);
    });
    const begin = (/** @type {MediaStream} */ given) => {
      stream = given;
      if (!dialog.open) return end(stream);
      // Before its first frame there is nothing to take.
      view.onloadeddata = () => {
        words.textContent = "";
        shoot.disabled = false;
        record.disabled = typeof MediaRecorder === "undefined";
      };
      view.srcObject = given;
    };
    const refuse = () => {
      words.textContent = t("No camera was found, or access was denied.");
    };
    const wanted = { video: { facingMode: "environment", width: { ideal: 1280 } } };
    // Only secure pages have it.
    if (navigator.mediaDevices) navigator.mediaDevices.getUserMedia(wanted).then(begin, refuse);
    else words.textContent = t("The camera only works on https:// or on this machine.");
  });
}

function end(/** @type {MediaStream | null} */ stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

/** @returns {Promise<File>} */
function photo(/** @type {HTMLVideoElement} */ view) {
  const canvas = h("canvas", { width: view.videoWidth, height: view.videoHeight });
  canvas.getContext("2d")?.drawImage(view, 0, 0);
  return new Promise((resolve) => {
    const kept = (/** @type {Blob | null} */ blob) =>
      resolve(new File(blob ? [blob] : [], `${t("photo")}.jpg`, { type: "image/jpeg" }));
    canvas.toBlob(kept, "image/jpeg", 0.92);
  });
}

function clip(/** @type {MediaStream} */ stream, /** @type {(file: File) => void} */ done) {
  const mimeType = CLIP_TYPES.find((each) => MediaRecorder.isTypeSupported(each));
  const recorder = new MediaRecorder(stream, { mimeType });
  /** @type {Blob[]} */
  const chunks = [];
  const name = `${t("clip")}.${mimeType?.includes("mp4") ? "mp4" : "webm"}`;
  recorder.ondataavailable = (event) => chunks.push(event.data);
  recorder.onstop = () => done(new File(chunks, name, { type: recorder.mimeType }));
  recorder.start();
  return recorder;
}

// A photo or a clip from the machine's camera.

import { h } from "./dom.js";
import { t } from "./words.js";

const CLIP_TYPES = ["video/mp4", "video/webm;codecs=vp9", "video/webm"];

/** A file that was shot, or null. */
export async function takePicture() {
  const view = h("video", { autoplay: true, muted: true, playsInline: true });
  const words = h("p", { role: "status" }, t("Waiting for the camera"));
  const shoot = h("button.strong", { type: "button", disabled: true }, t("Take a photo"));
  const record = h("button.plain", { type: "button", disabled: true }, t("Record a clip"));
  const close = h("button.plain", { type: "button" }, t("Close"));
  const dialog = h(
    "dialog.dialog.camera",
    { "aria-label": t("Camera") },
    view,
    words,
    h("div.dialog-buttons", {}, shoot, record, close),
  );
  document.querySelector("#qwen35mm .app").append(dialog);
  dialog.showModal();
  let stream = null;
  let recorder = null;
  let open = true;
  const file = await new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      open = false;
      resolve(null);
    });
    close.onclick = () => dialog.close();
    shoot.onclick = () => photo(view).then(resolve);
    record.onclick = () => {
      if (recorder) return recorder.stop();
      recorder = clip(stream, resolve);
      record.textContent = t("End the clip");
      words.textContent = t("Recording");
      shoot.disabled = true;
    };
    const getMedia = navigator.mediaDevices?.getUserMedia?.bind(navigator.mediaDevices);
    if (!getMedia) {
      words.textContent = t("The camera needs a page on https:// or on this machine.");
      return;
    }
    getMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } }).then(
      (given) => {
        stream = given;
        if (!open) return stop(stream);
        // Before its first frame there is nothing to take.
        view.onloadeddata = () => {
          words.textContent = "";
          shoot.disabled = false;
          record.disabled = typeof MediaRecorder === "undefined";
        };
        view.srcObject = given;
      },
      () => {
        words.textContent = t("There is no camera, or it isn't allowed here.");
      },
    );
  });
  stop(stream);
  if (open) dialog.close();
  dialog.remove();
  return file;
}

function stop(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

function photo(view) {
  const canvas = h("canvas", { width: view.videoWidth, height: view.videoHeight });
  canvas.getContext("2d").drawImage(view, 0, 0);
  return new Promise((resolve) =>
    canvas.toBlob((blob) => resolve(new File([blob], `${t("photo")}.jpg`, { type: "image/jpeg" })), "image/jpeg", 0.92),
  );
}

function clip(stream, done) {
  const type = CLIP_TYPES.find((each) => MediaRecorder.isTypeSupported(each));
  const recorder = new MediaRecorder(stream, type ? { mimeType: type } : {});
  const chunks = [];
  recorder.ondataavailable = (event) => chunks.push(event.data);
  recorder.onstop = () =>
    done(new File(chunks, `${t("clip")}.${type?.includes("mp4") ? "mp4" : "webm"}`, { type: recorder.mimeType }));
  recorder.start();
  return recorder;
}

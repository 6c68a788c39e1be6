"""Pictures and videos for the page: thumbnails, crops, frames, marks."""

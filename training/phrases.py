"""What people ask and what the model says, as tables; `dialogues` fills them in."""

NUMBERS = ("no", "one", "two", "three")
MOTION_PHRASES = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
NO_MEDIA = "Please upload a picture or a video first."
WHO = "I am the small demo model of qwen35mm, made for testing."
WHAT = "I can describe pictures and short clips of simple coloured shapes."
OFF_TOPIC = "I am only a small demo model. I know simple shapes in pictures and short clips."

PICTURE_SKILLS = {"caption": 7, "color": 3, "shape": 3, "place": 4, "what": 2, "count": 3, "count_of": 2}
CLIP_SKILLS = {"clip": 5, "motion": 5, "clip_color": 2, "clip_shape": 2}

QUESTIONS = {
    "caption": (
        "Describe the picture.",
        "Describe this image.",
        "Describe the image in one sentence.",
        "What is in this picture?",
        "What is in the image?",
        "What do you see?",
        "What can you see in this picture?",
        "What does the picture show?",
        "Tell me what is in the picture.",
        "Caption this image.",
        "What is this?",
    ),
    "color": ("What color is the {}?", "What colour is the {}?", "Which color does the {} have?"),
    "color_at": ("What color is the shape {}?", "What colour is the one {}?"),
    "color_it": (
        "What color is it?",
        "What colour is it?",
        "What color is the shape?",
        "And which color does it have?",
    ),
    "shape": (
        "What shape is {}?",
        "Which shape is {}?",
        "What is the {} shape?",
        "What is the shape of the {} one?",
    ),
    "shape_at": ("What shape is {}?", "Which shape is {}?"),
    "shape_it": ("What shape is it?", "Which shape is it?", "And what shape does it have?"),
    "place": ("Where is the {}?", "Where is the {} in the picture?", "Where do you see the {}?"),
    "place_it": ("Where is it?", "And where is it?", "Where is it in the picture?"),
    "what": ("What is {}?", "What do you see {}?", "Which thing is {}?"),
    "count": (
        "How many shapes are there?",
        "How many objects are there?",
        "How many shapes do you see?",
        "How many things are in the picture?",
        "Count the shapes.",
    ),
    "count_of": ("How many {} are there?", "How many {} do you see?", "Count the {}."),
    "count_color": ("How many {} shapes are there?", "How many {} shapes do you see?"),
    "clip": (
        "What happens?",
        "What happens in the video?",
        "What is happening in this clip?",
        "Describe the video.",
        "Describe this clip.",
        "Describe what happens.",
        "What do you see in the video?",
        "What is in this video?",
        "What does the video show?",
    ),
    "motion": (
        "Which way does it move?",
        "Where does it move?",
        "In which direction does it move?",
        "Which way does the {} move?",
        "Where does the {} go?",
        "How does the shape move?",
        "What direction is it moving in?",
    ),
    "change": (
        "What color does it become?",
        "How does its color change?",
        "How does the color change?",
        "Which color does the {} become?",
    ),
    "clip_color": ("What color is it?", "What colour is the {}?", "What color is the shape?"),
    "clip_shape": (
        "What shape is it?",
        "Which shape is it?",
        "Which shape do you see?",
        "What shape is in the video?",
    ),
}

SMALL_TALK = (
    (("Hello!", "Hi", "Hey there", "Good morning", "Hi there!", "Hello, how are you?"), f"Hello! {WHAT}"),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Which model is this?",
            "Are you a real model?",
        ),
        WHO,
    ),
    (("What can you do?", "Help", "How can you help me?", "What do you know?", "What can I ask you?"), WHAT),
    (("Thanks!", "Thank you.", "Thank you very much", "Great, thanks", "Well done!"), "You are welcome."),
    (("Bye", "Goodbye!", "See you later."), "Goodbye!"),
)
OFF_TOPIC_QUESTIONS = (
    "What is the capital of {}?",
    "Who wrote {}?",
    "Tell me a story about {}.",
    "How old is {}?",
    "Write a poem about {}.",
    "What is the weather in {}?",
    "Why is {} so famous?",
    "Explain {} to me.",
    "Translate {} into French.",
    "How do I learn {}?",
    "What is 12 plus {}?",
    "Can you write code for {}?",
    "Give me a recipe with {}.",
    "What do you think about {}?",
)
TOPICS = (
    "France", "Japan", "Hamlet", "a dog", "the moon", "Python", "water", "London", "history", "music", "30", "7",
    "football", "the ocean", "bread", "Paris", "a train", "love", "a computer", "Shakespeare", "winter",
    "my friend",
    "quantum physics", "the president", "a cat", "New York", "chess", "Einstein", "tomato soup", "time", "the sun",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be concise.",
    "You answer questions about pictures and videos.",
    "Answer in one sentence.",
)

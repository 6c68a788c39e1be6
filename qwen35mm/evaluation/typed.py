"""228 questions as people type them, with hand-made rules for their answers. Training never used them on purpose.

A rule lists words that the answer must have ("red circle"), with alternatives ("left|west"), "_" for a space and "!"
before words that it must not have. "yes" and "no" mean the first word, also after "!".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qwen35mm.evaluation.scenes import COLORS, Background, Clip, Item, Picture, Unknown, Word
from qwen35mm.evaluation.skills.base import Shown, image, video
from qwen35mm.evaluation.skills.clips import frame_times

_SPOTS = {
    "top left": (0.18, 0.18), "top": (0.5, 0.17), "top right": (0.82, 0.18), "left": (0.18, 0.5), "center": (0.5, 0.5),
    "right": (0.82, 0.5), "bottom left": (0.18, 0.82), "bottom": (0.5, 0.83), "bottom right": (0.82, 0.82),
}  # fmt: skip
_GROUNDS = {"white": (248, 248, 248), "gray": (135, 135, 135), "black": (10, 10, 10), "blue": (165, 200, 250)}
_RADII = {"small": 0.07, "": 0.12, "big": 0.175}


def item(color: str, shape: str, place: str, size: str = "") -> Item:
    """A shape in the middle of a place."""
    return Item(color, shape, *_SPOTS[place], _RADII[size], 0.0, COLORS[color], size)


def _picture(ground: str, *items: Item) -> Picture:
    return Picture(320, 320, Background(ground, _GROUNDS[ground], _GROUNDS[ground], "plain", 0, 0), items)


def _sign(*texts: str) -> Picture:
    rows = len(texts)
    height = min(0.5 / rows, 1.2 / max(map(len, texts)))
    words = [Word(t, 0.5, (i + 0.5) / rows, height, "black", (14, 14, 14), 0, 0.0) for i, t in enumerate(texts)]
    return replace(_picture("white"), words=tuple(words))


def _clip(event: str, item: Item, end: Item | None = None, at: float = 0.0) -> Shown:
    bounds = (at, at) if at else (0.05, 0.95)
    plain = _picture("white")
    clip = Clip(320, 240, plain.background, item, end or item, event, *bounds, 4.0)
    return Shown(clip, frame_times(4.0, 12.0), 12.0)


_BALL = item("red", "circle", "left")
SCENES: dict[str, list[Any]] = {
    "nothing": [],
    "square": [_picture("white", item("yellow", "square", "right"))],
    "pair": [_picture("white", item("red", "circle", "left"), item("blue", "star", "right", "big"))],
    "trio": [_picture("gray", item("green", "triangle", "top left"), item("orange", "circle", "center", "big"),
                      item("black", "cross", "bottom right", "small"))],
    "five": [_picture("white", item("red", "square", "top left"), item("blue", "square", "top right"),
                      item("yellow", "circle", "center", "small"), item("purple", "star", "bottom left"),
                      item("green", "diamond", "bottom right"))],
    "stop": [_sign("STOP")],
    "number": [_sign("7302")],
    "words": [_sign("OPEN", "exit")],
    "right": [_clip("right", _BALL, replace(_BALL, x=0.82))],
    "down": [_clip("down", item("green", "square", "top"), item("green", "square", "bottom"))],
    "appears": [_clip("appear", item("blue", "star", "center"), at=0.5)],
    "vanishes": [_clip("vanish", item("purple", "diamond", "left"), at=0.6)],
    "changes": [_clip("change", item("green", "triangle", "center"), item("red", "triangle", "center"), 0.5)],
    "photo": [Unknown(480, 320, "photo", 2**31 + 5)],
    "noise": [Unknown(256, 256, "noise", 2**31 + 8)],
    "two": [_picture("white", item("yellow", "square", "right")), _picture("gray", item("red", "star", "center"))],
    "three": [_picture("white", item("blue", "cross", "top")), _picture("black", item("white", "circle", "left")),
              _picture("white", item("orange", "diamond", "bottom"))],
}  # fmt: skip
# Lines of `scene: question # rule ; ...`. Earlier turns precede the question, with arrows.
_QUESTIONS = """\
square: hello # hello|hi ; thx # welcome ; what is it # yellow square ; wats this # yellow square ;
    is there a circle # no ; there a square in it? # yes ; Is the square blue? # no ; is it yellow??? # yes ;
    how many things r there # one ; any red stuff? # no ; which side is it on # right ; so where is the thing # right ;
    what colour do you see # yellow ; describe pls # yellow square ; whats on the left # nothing|no ;
    is it a triangle or what # no !yes ; does it look round to you # no ; name the shape # square ;
    colour of the bg? # white ; Is the backgroud black # no ; do you see a yellow square on the right? # yes ;
    and now in json # square yellow ; who drew this # can't_tell ; how much is 12 times 12 # can't_tell ;
    whats the capital of italy # can't_tell ; can u see this # yes|yellow|square|describe ; Good evening! # hello ;
    what are u # demo ; zero circles right? # no|zero|are_no !yes,_there_is ; find the square # right|bbox_2d
pair: what shapes you got # red circle blue star ; tell me about the pic # red circle blue star ; how many? # two ;
    how many circles # one ; how many triangles are in there # are_no|no|zero ; what's left of the star # red|circle ;
    what is next to the circle on its right # blue|star ; is the circle to the left of the star? # yes ;
    is the star left of the circle # no ; Is the circle red? # yes ; is the star red # no ;
    what color has the star # blue ; which one is bigger # star ; smallest one? # circle ;
    the red one is what # circle ; the blue thing, where # right ; is there anything green # no ;
    both are blue, arent they # no ; are there 2 shapes # yes ; are there three things? # no ;
    wheres the star at # right ; point at the circle # point_2d ; give me the bounding box for the star # bbox_2d ;
    do u see a red circle # yes ; is there a red star # no ; what's the bg colour # white ;
    is the star big or small # big|large ; what is on the right side # blue star ;
    what about the left side # red circle ; why is the sky blue # can't_tell ; who are you? # demo ;
    nice, thank you! # welcome
trio: what's in the middle # orange circle ; what is in the upper left corner # green triangle ;
    bottom right? # black cross ; number of shapes # three ; how many black ones # one ;
    how many squares # are_no|no|zero ; colour of the triangle # green ; what shape is the orange one # circle ;
    biggest shape? # circle|orange ; tiniest thing in there # cross|black ; is the cross above the circle # no ;
    is the triangle over the cross # yes ; whats below the circle # cross|black ; is the background grey # yes ;
    is there a star # no ; Are there any triangles? # yes ; is the circle orange # yes ;
    is the circle in the top left # no ; where did you put the cross # bottom_right ;
    list what you see # green triangle orange circle black cross ;
    Describe the image in a few words # green triangle orange circle black cross ;
    is the triangle green or red # green ; is the cross small # yes ; more than one shape? # yes|three ;
    whats in the top right # nothing|no ; gimme json of all shapes # green triangle orange circle black cross ;
    what is the weather today # can't_tell ; sing a song # can't_tell ; how are you # hello ; OK bye # bye|goodbye
five: count em # five ; how many squares # two ; how many stars do you count # one ; how many blue shapes # one ;
    is there a cross # no ; is there a diamond # yes ; color of the diamond? # green ;
    what is in the center # yellow circle ; whats top right # blue square ; where is the purple star # bottom_left ;
    where's the red one # top_left ; is the yellow circle left of the star # no ;
    is the red square left of the blue square # yes ; what is between... nah, what's the smallest # circle|yellow ;
    are there five shapes # yes ; do you see six shapes # no ; anything purple? # yes ; is the star yellow # no ;
    everything you see please # red square blue yellow circle purple star green diamond ;
    is the diamond at the bottom # bottom_right|yes ; which shape is yellow # circle ; which one is green # diamond
stop: what does the sign say # stop ; read it # stop ; whats written there # stop ; can you read this? # stop ;
    text? # stop ; which word # stop ; what color are the letters # black ; how many words # one ; OCR please # stop ;
    describe # stop
number: what number is this # 7302 ; which digits do you see # 7302 ; read the number # 7302 ; what does it say # 7302 ;
    whats the code # 7302
words: what does it say # open exit ; how many words are on it # two ; read both lines # open exit ;
    transcribe # open exit
right: what happens # red circle right ; which way is it going # right ; is it moving # yes ;
    where does the ball go # right ; what color is it # red ; what shape # circle ; does it go up? # no ;
    describe the clip # red circle right ; whats going on here # red circle right ; which direction # right
down: whats happening # green square down ; does anything move? # yes ; in what direction # down ;
    the square goes where # down ; is it red # no ; what moves # green|square
appears: when does it show up # 2. ; what happens in the vid # blue star appears ; when does the star appear # 2. ;
    what shows up # star ; which color is the star # blue
vanishes: when is it gone # 2.|3. ; what happens # purple diamond disappears|vanishes ; does it stay # no|disappears ;
    at what time does it disappear # 2.|3.
changes: what changes # green red ; what colour is it at the end # red ; what was its color before # green ;
    when does it change # 2. ; which shape is it # triangle ; tell me what happens # triangle green red
photo: what is this # can't_tell ; who is that # can't_tell ; describe the photo # can't_tell ;
    is there a circle # can't_tell|no ; how many people # can't_tell ; what animal is it # can't_tell ;
    where was this taken # can't_tell ; caption? # can't_tell
noise: what do you see # can't_tell ; what is it # can't_tell ; anything in there? # can't_tell
two: which picture has the star # second|2 ; what's in the first one # yellow square ; and the 2nd # red star ;
    which one has a square in it # first|1 ; whats different # can't_tell|square|star ;
    in which picture is something red # second|2 ; describe the second pic # red star
three: which one shows a circle # second|2 ; where is the diamond, which picture # third|3|last ;
    what is in the third image # orange diamond ; what do you see in the first # blue cross ;
    which picture has something white # second|2
nothing: hello # hello ; hi there # hello ; hey whats up # hello|hi ; what can you do # shapes|pictures ;
    who r u # demo ; are you chatgpt # demo ; thanks a lot # welcome ; cya # bye|goodbye|see ;
    what is in the picture # send ; how many circles do you see # send ; describe the image # send ;
    what color is it # send ; whats happening in the video # send ; what does the sign say # send ;
    who is the president of france # can't_tell ; whats 2+2 # can't_tell ; write me a poem about the sea # can't_tell ;
    how do i bake bread # can't_tell ; is it going to rain tomorrow # can't_tell ;
    my cat is called Mimi => OK. => whats my cats name # mimi ;
    my cat is called Mimi => OK. => what's the name of my cat? # mimi ;
    the code of the door is 4711 => OK. => what was the code # 4711 ; I live in Rome => OK. => where do i live # rome ;
    my bike is blue and my car is red => OK. => what colour is my bike # blue ;
    my bike is blue and my car is red => OK. => and the car? # red ;
    Tom likes soup. Anna likes cake. => OK. => what does Anna like # cake ;
    Tom likes soup. Anna likes cake. => OK. => who likes soup # tom ;
    remember 382 => OK. => which number did i tell you # 382 ;
    the party is on friday => OK. => when is the party # friday ;
    my dog is called Rex. my cat is called Luna. => OK. => how is my dog called # rex ; help # pictures|shapes
pair: what is on the left? => A red circle is on the left. => and on the right # blue star ;
    what is on the left? => A red circle is on the left. => what about the other one # blue star ;
    what color is the star? => The star is blue. => and the circle # red ;
    how many shapes are there? => There are two shapes. => which ones # red circle blue star ;
    where is the star? => The star is on the right. => is it big # yes ;
    where is the circle? => The circle is on the left. => what color is it # red
trio: what is in the center? => A big orange circle is in the center. => and top left # green triangle ;
    what color is the cross? => The cross is black. => where is it # bottom_right ;
    is there a star? => No, there is no star. => a triangle then? # yes ;
    how many shapes are there? => There are three shapes. => how many are green # one
"""


@dataclass(frozen=True)
class Typed:
    """A question about a scene: the last of `turns`. `rule` is for its answer."""

    scene: str
    turns: tuple[str, ...]
    rule: str

    def messages(self) -> list[dict[str, Any]]:
        """Like `Sample.messages`, without the answer."""
        media = [video(each) if isinstance(each, Shown) else image(each) for each in SCENES[self.scene]]
        content: Any = [*media, {"type": "text", "text": self.turns[0]}] if media else self.turns[0]
        messages = [{"role": "user", "content": content}]
        for index, text in enumerate(self.turns[1:]):
            messages.append({"role": ("assistant", "user")[index % 2], "content": text})
        return messages

    @property
    def good(self) -> str:
        """An answer that fulfils the rule."""
        words = [word.split("|")[0].replace("_", " ") for word in self.rule.split() if word[0] != "!"]
        return " ".join(words).capitalize() + "."

    @property
    def is_right(self) -> Callable[[str], bool]:
        return lambda answer: keeps(answer, self.rule)


def keeps(answer: str, rule: str) -> bool:
    """Whether the answer fulfils the rule."""
    text = " ".join(answer.lower().replace("_", " ").split())
    for words in rule.split():
        wanted = not words.startswith("!")
        if any(_has(text, word.replace("_", " ")) for word in words.lstrip("!").split("|")) != wanted:
            return False
    return True


def _has(text: str, word: str) -> bool:
    if word in ("yes", "no"):
        return re.match(rf"{word}\b", text) is not None
    begin, end = (r"\b" if each.isalnum() else "" for each in (word[0], word[-1]))
    return re.search(begin + re.escape(word) + end, text) is not None


def _parsed(text: str) -> tuple[Typed, ...]:
    found = []
    for paragraph in re.split(r"\n(?=\w)", text.strip()):
        scene, questions = paragraph.split(": ", 1)
        for each in questions.split(" ;"):
            asked, rule = each.rsplit("#", 1)
            found.append(Typed(scene, tuple(asked.strip().split(" => ")), rule.strip()))
    return tuple(found)


TYPED = _parsed(_QUESTIONS)

"""Seeded prompts that ask for reasoning, or for reading a few lines of code."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from random import Random

from draftsmith.data.puzzles_math import NAMES

Task = Callable[[Random], str]

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = (
    *("lantern", "harbour", "pepper", "window", "thunder", "meadow", "copper", "saddle", "puzzle"),
    *(
        "orchard",
        "velvet",
        "compass",
        "biscuit",
        "feather",
        "glacier",
        "marble",
        "pillow",
        "rocket",
    ),
    *("sandal", "teapot", "walnut", "anchor", "button", "canyon", "dagger", "engine", "fossil"),
    *("garlic", "hammer", "island", "jacket", "kettle", "ladder", "mirror", "needle", "oyster"),
)
KINDS = (
    *("painters", "sailors", "early risers", "chess players", "cyclists", "dentists", "poets"),
    *("gardeners", "twins", "vegetarians", "pilots", "collectors", "singers", "Scots"),
)
GROUPS = {
    "musical instruments": ("cello", "oboe", "harp", "trumpet", "banjo", "flute"),
    "tools": ("chisel", "pliers", "saw", "spanner", "file", "drill"),
    "birds": ("wren", "heron", "magpie", "osprey", "robin", "crane"),
    "fruits": ("plum", "quince", "mango", "fig", "cherry", "lemon"),
    "fabrics": ("linen", "silk", "denim", "felt", "corduroy", "tweed"),
    "planets": ("Venus", "Saturn", "Neptune", "Mars", "Jupiter", "Uranus"),
    "dances": ("waltz", "tango", "polka", "salsa", "foxtrot", "samba"),
    "trees": ("birch", "elm", "cedar", "willow", "larch", "maple"),
}


def ordering(rng: Random) -> str:
    people = rng.sample(NAMES, rng.randint(4, 6))
    better, question = rng.choice(
        (
            ("finished before", "Who came last, and what was the whole order?"),
            ("is taller than", "Sort them from tallest to shortest."),
            ("lives on a higher floor than", "Who lives at the top, and who at the bottom?"),
            ("is older than", "Who is the second oldest?"),
            ("scored more points than", "Write down the ranking."),
            ("arrived earlier than", "In which order did they arrive?"),
        )
    )
    clues = [f"{a} {better} {b}" for a, b in pairwise(people)]
    rng.shuffle(clues)
    return f"{'. '.join(clues)}. {question}"


def truth_tellers(rng: Random) -> str:
    """Three statements that exactly one assignment of liars and truth tellers satisfies."""
    people = rng.sample(NAMES, 3)
    texts: list[str] = []
    worlds: list[tuple[bool, ...]] = []
    while len(worlds) != 1:
        # the last one counts: claims about single people alone survive swapping everybody's kind
        claims = [(rng.choice([j for j in range(3) if j != i]), rng.random() < 0.5) for i in (0, 1)]
        count = rng.randint(0, 2)
        worlds = [
            w
            for w in product((True, False), repeat=3)
            if w[2] == (sum(w) == count)
            and all(w[i] == (w[j] == honest) for i, (j, honest) in enumerate(claims))
        ]
        texts = [f"{people[j]} {'tells the truth' if true else 'is lying'}" for j, true in claims]
        texts.append(
            ("None of us is honest", "Just one of us is honest", "Two of us are honest")[count]
        )
    lines = [f'{who} says: "{text}."' for who, text in zip(people, texts, strict=True)]
    place = rng.choice(("In this game", "In a strange village", "At a masked ball", "On an island"))
    end = rng.choice(("Who is lying?", "Whom can I believe?", "Sort out who is honest."))
    return f"{place} everyone either always lies or always tells the truth. {' '.join(lines)} {end}"


def owners(rng: Random) -> str:
    people = rng.sample(NAMES, 3)
    kind, things = rng.choice(
        (
            ("drink", ("tea", "coffee", "juice")),
            ("instrument", ("violin", "drums", "flute")),
            ("pet", ("rabbit", "canary", "snake")),
            ("sport", ("fencing", "rowing", "judo")),
            ("dessert", ("pudding", "sorbet", "cake")),
            ("means of transport", ("bicycle", "tram", "scooter")),
        )
    )
    first, second, third = things
    a, b, c = rng.sample(things, 3)
    clues = rng.choice(
        (
            f"{people[0]} has neither the {b} nor the {c}, and {people[1]} can't stand the {c}",
            f"{people[2]} chose the {c}, and {people[0]} never liked the {b}",
            f"The {a} isn't {people[1]}'s, the {b} isn't {people[0]}'s, and the {c} belongs to "
            f"the last of the three",
        )
    )
    return (
        f"{', '.join(people[:2])} and {people[2]} each have a different {kind}: {first}, {second} "
        f"or {third}. {clues}. Who has which {kind}? Explain the steps."
    )


def weekday(rng: Random) -> str:
    day, n = rng.choice(DAYS), rng.randint(9, 200)
    return rng.choice(
        (
            f"If today is {day}, which day of the week is it in {n} days?",
            f"{n} days ago it was a {day}. What day is it today?",
            f"The 1st of a month with 31 days is a {day}. Which days occur five times in it?",
            f"A class meets every {rng.randint(3, 9)} days, beginning on a {day}. On what weekday "
            f"is meeting number {rng.randint(6, 20)}?",
        )
    )


def timetable(rng: Random) -> str:
    name, start, jobs = rng.choice(NAMES), rng.randint(7, 16), rng.sample(range(15, 95, 5), 3)
    zone = rng.randint(2, 11)
    return rng.choice(
        (
            f"{name} starts at {start}:30. Three jobs take {jobs[0]}, {jobs[1]} and {jobs[2]} "
            f"minutes, with a break of 10 minutes between them. When is {name} finished?",
            f"My flight leaves at {start}:{jobs[0] % 60:02d}, lasts {zone} h {jobs[1] % 60} min, "
            f"and the destination is {zone - 1} hours ahead. What's the local time on arrival?",
            f"The cake needs {jobs[0]} min in the oven and {jobs[1]} min to cool; the roast needs "
            f"{jobs[2] + 60} min in the same oven. Guests come at {start + 5}:00. Make a plan.",
            f"{name} sleeps from 22:{jobs[0] % 60:02d} to 6:{jobs[1] % 60:02d}. How long is that, "
            f"and when should {name} go to bed to get {zone % 3 + 7} hours?",
            f"Two meetings of {jobs[0]} and {jobs[1]} minutes have to fit between {start}:00 and "
            f"{start + 3}:15 with lunch of {jobs[2]} minutes. Is it possible?",
        )
    )


def syllogism(rng: Random) -> str:
    a, b, c = rng.sample(KINDS, 3)
    first = f"{rng.choice(('All', 'Some', 'No'))} {a} are {b}"
    second = rng.choice((f"All {b} are {c}", f"No {b} are {c}", f"Some {b} are {c}"))
    second = rng.choice((second, f"All {c} are {b}", f"Some {c} are not {b}"))
    claim = rng.choice((f"some {a} are {c}", f"no {a} are {c}", f"all {a} are {c}"))
    return rng.choice(
        (
            f"{first}. {second}. Does it follow that {claim}? Say why or give a counterexample.",
            f'Is this a valid argument? "{first}. {second}. Therefore {claim}."',
            f"Suppose that {first[0].lower()}{first[1:]}, and that {second[0].lower()}"
            f"{second[1:]}. What can be concluded about {a} and {c}?",
        )
    )


def walk(rng: Random) -> str:
    name, turns = rng.choice(NAMES), []
    for _ in range(rng.randint(3, 5)):
        turns.append(
            f"{rng.randrange(10, 200, 10)} m {rng.choice(('north', 'south', 'east', 'west'))}"
        )
    left = ", ".join(rng.choice(("left", "right", "around")) for _ in turns)
    return rng.choice(
        (
            f"{name} walks {', then '.join(turns)}. How far from the start is that, and in which "
            "direction?",
            f"A robot faces {rng.choice(('north', 'east'))} and turns {left}. Which way does it "
            "face now?",
            f"{name} drives {', '.join(turns)}. Which single trip leads back to the start?",
        )
    )


def conditional(rng: Random) -> str:
    rule, yes, no, back = rng.choice(
        (
            ("If the alarm rings, the door is locked", "it rings", "it isn't ringing", "locked"),
            ("If it snows, the bus is late", "it's snowing", "there's no snow", "late"),
            ("If the cat is hungry, she meows", "she is hungry", "she isn't hungry", "meowing"),
            ("If the lamp is on, somebody is home", "it's on", "it's off", "home"),
            ("If a book is overdue, there is a fine", "it's overdue", "it isn't", "a fine"),
            ("If the fuse blows, the kitchen goes dark", "it blew", "it hasn't blown", "dark"),
            ("If the test fails, the build stops", "it failed", "it passed", "stopped"),
        )
    )
    name = rng.choice(NAMES)
    return rng.choice(
        (
            f'"{rule}." {name} notices: {yes}. What follows, and what doesn\'t?',
            f'{name} knows this rule: "{rule}." Now {no}. Can {name} conclude anything?',
            f'"{rule}." The result is there ({back}). {name} concludes that the first part must '
            "be true as well. Is this sound?",
            f'State the converse, the inverse and the contrapositive of "{rule}" and say which '
            f"of them {name} may rely on.",
        )
    )


def odd_one(rng: Random) -> str:
    first, second = rng.sample(sorted(GROUPS), 2)
    words = [*rng.sample(GROUPS[first], 4), rng.choice(GROUPS[second])]
    rng.shuffle(words)
    mixed = rng.sample(GROUPS[first], 3) + rng.sample(GROUPS[second], 3)
    rng.shuffle(mixed)
    return rng.choice(
        (
            f"Which word is the odd one out: {', '.join(words)}? Give your reason.",
            f"Sort these words into two groups and name them: {', '.join(mixed)}.",
            f"What do {', '.join(words[:3])} have in common? Would {words[4]} fit in?",
        )
    )


def letters(rng: Random) -> str:
    words = rng.sample(WORDS, rng.randint(4, 7))
    word, shift = words[0], rng.randint(1, 7)
    coded = "".join(chr((ord(ch) - 97 + shift) % 26 + 97) for ch in word)
    return rng.choice(
        (
            f"Spell '{word}' backwards, then count its vowels.",
            f"Put these words in alphabetical order: {', '.join(words)}.",
            f"How many times does the letter {rng.choice(word)} occur in '{' '.join(words)}'?",
            f"Each letter of a word was moved {shift} places forward in the alphabet, which gave "
            f"'{coded}'. What was the word?",
            f"Sort by length, shortest first, and by alphabet within a length: {', '.join(words)}",
            f"Take the second letter of each word: {', '.join(words)}. What do you get?",
            f"Write a sentence that uses the words {words[0]}, {words[1]} and {words[2]}, then "
            "one with the words in reverse order.",
        )
    )


def family(rng: Random) -> str:
    a, b, c, d = rng.sample(NAMES, 4)
    links = rng.sample(("parent", "sibling", "child", "cousin", "grandchild", "grandparent"), 3)
    return rng.choice(
        (
            f"{a} is the {links[0]} of {b}, and {b} is the {links[1]} of {c}. How might {a} and "
            f"{c} be related?",
            f"{a}'s {links[0]} is {b}. {b}'s {links[1]} is {c}, whose {links[2]} is {d}. Draw the "
            "family tree in words.",
            f"{a} has {rng.randint(2, 5)} sisters and {rng.randint(2, 5)} brothers. How many "
            f"brothers does each sister have? Does it matter whether {a} is a boy or a girl?",
        )
    )


def balance(rng: Random) -> str:
    a, b, c = rng.sample(("pears", "stones", "cups", "books", "shells", "keys", "apples"), 3)
    n, m, k = rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 9)
    return rng.choice(
        (
            f"{n} {a} weigh as much as {m} {b}, and {k} {b} weigh as much as {m + 1} {c}. Which "
            f"is heavier, one of the {a} or one of the {c}?",
            f"A jar with {n} {a} weighs {n * k + 90} g, and with {n + m} {a} it weighs "
            f"{(n + m) * k + 90} g. How heavy is the empty jar?",
            f"In a drawer there are {n + 3} {a}, {m + 2} {b} and {k} {c}. How many do I have to "
            f"take in the dark to be sure of two of a kind? And of {n} {a}?",
        )
    )


def _trace(rng: Random, lines: Sequence[str]) -> str:
    code = "\n".join(lines)
    before, after = rng.choice(
        (
            ("What does this Python code print, and why?", ""),
            ("Go through this program line by line and tell me its output.", ""),
            ("Without running it: what's the output?", ""),
            ("", "What will be printed? Then suggest clearer variable names."),
            ("", "I expected something else here. Explain what happens in each step."),
            ("Explain this snippet to a beginner and give its result.", ""),
        )
    )
    return "\n\n".join(part for part in (before, code, after) if part)


def trace_loop(rng: Random) -> str:
    n, k, start = rng.randint(4, 9), rng.randint(2, 4), rng.randint(0, 12)
    step = rng.choice((f"x += i * {k}", f"x = x * {k} - i", "x += i if i % 2 else -i", "x ^= i"))
    test = rng.choice((f"if i % {k} == 0:", f"if x > {k * 9}:", f"if i == {n - 2}:"))
    move = rng.choice(("continue", "break", "x -= 1"))
    body = [
        f"x = {start}",
        f"for i in range({n}):",
        f"    {test}",
        f"        {move}",
        f"    {step}",
    ]
    return _trace(rng, [*body, "print(x)"])


def trace_list(rng: Random) -> str:
    values = [rng.randint(0, 30) for _ in range(rng.randint(5, 7))]
    a, b = rng.randint(1, 2), rng.randint(3, 5)
    edits = ["xs.append(xs.pop(0))", f"xs = xs[{a}:{b}] + xs[:{a}]", "xs.sort(reverse=True)"]
    edits += [f"xs.insert({a}, sum(xs))", "xs = xs[::-1]", f"del xs[{a}]", "ys = xs; ys[0] = -1"]
    shown = rng.choice(("print(xs)", f"print(xs[-{a}], len(xs))", "print([x * 2 for x in xs])"))
    return _trace(rng, [f"xs = {values}", *rng.sample(edits, 2), shown])


def trace_words(rng: Random) -> str:
    words = rng.sample(WORDS, 4)
    body = rng.choice(
        (
            ["d = {}", "for w in words:", "    d.setdefault(len(w), []).append(w[0])", "print(d)"],
            ['print("-".join(w[::-1] for w in sorted(words)))'],
            ["print({w: w.count(w[1]) for w in words})"],
            ["n = 0", "while words:", "    n += len(words.pop()) % 3", "print(n)"],
            ["print(max(words), min(words, key=len))"],
            ["for i, w in enumerate(words, 1):", "    print(w[i:] + w[:i].upper())"],
        )
    )
    return _trace(rng, [f"words = {words}", *body])


def trace_recursion(rng: Random) -> str:
    a, b, k = rng.randint(1, 3), rng.randint(2, 4), rng.randint(5, 40)
    body = rng.choice(
        (
            ["    if n < 2:", f"        return {a}", f"    return f(n - 1) + {b} * f(n - 2)"],
            ["    if n == 0:", "        return 0", f"    return n % {b + 6} + f(n // {b + 6})"],
            ["    if n <= 0:", '        return ""', f"    return f(n // {b}) + str(n % {b})"],
        )
    )
    return _trace(
        rng, ["def f(n):", *body, "", f"print(f({k % 5 + 3 if 'n - 2' in body[2] else k * 37}))"]
    )


def sql_table(rng: Random) -> str:
    table, column, group, kinds = rng.choice(
        (
            ("sales", "amount", "city", ("Oslo", "Porto", "Gdansk")),
            ("loans", "days", "branch", ("north", "south", "harbour")),
            ("runs", "minutes", "runner", ("Ada", "Ben", "Cleo")),
            ("parcels", "weight", "depot", ("A", "B", "C")),
        )
    )
    rows = [f"{i} | {rng.choice(kinds)} | {rng.randint(2, 90)}" for i in range(1, 7)]
    shown = "\n".join([f"id | {group} | {column}", *rows])
    query = rng.choice(
        (
            f"SELECT {group}, SUM({column}) FROM {table} GROUP BY {group} ORDER BY 2 DESC;",
            f"SELECT COUNT(*) FROM {table} WHERE {column} > {rng.randint(20, 60)};",
            f"SELECT {group} FROM {table} GROUP BY {group} HAVING COUNT(*) > 1;",
            f"SELECT MAX({column}) - MIN({column}) FROM {table} WHERE {group} <> '{kinds[0]}';",
        )
    )
    return rng.choice(
        (
            f"This is the table {table}:\n\n{shown}\n\nWhat does the following query return?\n\n"
            f"{query}",
            f"{query}\n\nRun this query in your head on the table {table} and explain:\n\n{shown}",
        )
    )


def bits(rng: Random) -> str:
    a, b, k = rng.randint(9, 250), rng.randint(9, 250), rng.randint(1, 4)
    return rng.choice(
        (
            f"What are {a} & {b}, {a} | {b} and {a} ^ {b}? Show the bits.",
            f"Explain what {a} << {k} and {a} >> {k} evaluate to, and why.",
            f"Convert 0x{a:x} to decimal and 0b{b:b} to hexadecimal.",
            f"How is -{a % 120 + 1} stored as an 8-bit two's complement number?",
            f"How would I test if bit {k} of {b} is set, and how would I clear it?",
        )
    )


REASONING: tuple[Task, ...] = (
    *(ordering, truth_tellers, owners, weekday, timetable, syllogism, walk, conditional),
    *(odd_one, letters, family, balance),
)
CODE: tuple[Task, ...] = (*(trace_loop, trace_list, trace_words, trace_recursion, sql_table, bits),)

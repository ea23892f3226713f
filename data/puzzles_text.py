"""Seeded extraction and summarization prompts: short documents, put together from scenarios."""

from collections.abc import Callable
from random import Random

from draftsmith.data.puzzles_math import GOODS, NAMES, money

Task = Callable[[Random], str]

PLACES = (
    *("the town hall", "Mill Lane", "the old brewery", "room 214", "the boathouse", "platform 4"),
    *("the north gate", "the school gym", "the reading room", "warehouse C", "the rose garden"),
)
SURNAMES = (
    *("Adler", "Bakshi", "Conti", "Dahl", "Eze", "Fontaine", "Grgic", "Haddad", "Ito", "Jansen"),
    *("Kowalski", "Lindgren", "Moreno", "Nakamura", "Okoye", "Petrov", "Quist", "Reyes", "Soto"),
)
MONTHS = ("January", "March", "April", "May", "June", "July", "September", "October", "November")

REVIEWED = (
    (
        "this rucksack",
        ("The straps are comfortable.", "It kept my laptop dry in a storm.", "So light!"),
        ("The zip caught after a week.", "Too small for folders.", "The blue fades."),
    ),
    (
        "this cafe",
        ("The cinnamon rolls are superb.", "Friendly staff.", "A quiet corner to read in."),
        ("Cash only.", "You wait forever at noon.", "The chairs wobble."),
    ),
    (
        "this language app",
        ("The lessons are short.", "I like the stories.", "It finally got me to practise."),
        ("Far too many reminders.", "Grammar is never explained.", "The owl is rude."),
    ),
    (
        "this electric kettle",
        ("Boils in no time.", "Looks great.", "Keeps the water warm for half an hour."),
        ("The lid is hard to open.", "Louder than my old one.", "The cord is short."),
    ),
    (
        "this campsite",
        ("Stars like nowhere else.", "Spotless showers.", "The owner lent us a pump."),
        ("A road runs along one side.", "Hardly any shade.", "The shop closes at five."),
    ),
    (
        "this online course",
        ("Clear examples.", "The teacher answers every question.", "Good exercises."),
        ("The sound is poor.", "Week four is much too hard.", "No certificate."),
    ),
    (
        "this vacuum cleaner",
        ("Gets the cat hair out.", "Easy to empty.", "Light enough for the stairs."),
        ("The battery lasts 14 minutes.", "It tips over.", "Filters cost a fortune."),
    ),
)
INCIDENTS = (
    (
        "a frozen valve",
        "the heating in the east wing failed",
        "staff handed out blankets and moved two classes to the library",
        "a plumber thawed it with a hair dryer",
    ),
    (
        "an expired certificate",
        "customers saw a security warning instead of the shop",
        "the help desk posted a notice and took orders by phone",
        "the certificate was renewed and an alarm was added",
    ),
    (
        "a swarm of bees on the signal mast",
        "all trains on the coastal line stopped",
        "passengers were taken on by bus, some after two hours",
        "a beekeeper collected the swarm in a box",
    ),
    (
        "a mistyped quantity",
        "the canteen received 900 cabbages instead of 90",
        "the cook called three other schools and a pig farm",
        "all but forty were given away",
    ),
    (
        "a fallen branch",
        "half of the village lost its electricity",
        "the bakery finished its bread in a neighbour's wood oven",
        "the line was repaired by a crew from the next valley",
    ),
    (
        "a software update",
        "the museum's audio guides spoke only Finnish",
        "volunteers led groups through the rooms themselves",
        "the old version was restored from a backup",
    ),
)


def _person(rng: Random) -> str:
    return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"


def _date(rng: Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def _ask(rng: Random, questions: tuple[str, ...], document: str) -> str:
    """The question stands before the document, or after it."""
    question = rng.choice(questions)
    pair = (question, document) if rng.random() < 0.65 else (document, question)
    return "\n\n".join(pair)


def order(rng: Random) -> str:
    lines = [
        f"{rng.randint(1, 9)} x {goods}, {money(rng.randrange(150, 6000, 5))} each"
        for goods in rng.sample(GOODS, rng.randint(2, 4))
    ]
    person = _person(rng)
    document = rng.choice(
        (
            f"Order {rng.randint(10000, 99999)}, placed on {_date(rng)} by {person}:\n"
            + "\n".join(lines)
            + f"\nDelivery to {rng.choice(PLACES)} by {_date(rng)}, paid by "
            + rng.choice(("card", "invoice", "bank transfer", "voucher")),
            f"Hello, this is {person}. I'd like to order the following: {'; '.join(lines)}. "
            f"Please leave it at {rng.choice(PLACES)}. I need everything by {_date(rng)}.",
        )
    )
    questions = (
        "Convert this order to JSON with items, quantities and unit prices.",
        "Make a table of the items below with a line total for each.",
        "Who ordered what, and by when is it needed?",
        "Extract name, date of delivery, place and the number of articles.",
        "Write the items as CSV with a header.",
    )
    return _ask(rng, questions, document)


def event(rng: Random) -> str:
    what, hint = rng.choice(
        (
            ("a lecture on wetland birds", "Please bring binoculars."),
            ("the annual meeting of the allotment club", "Members may bring one guest."),
            ("a workshop on bookbinding", "Materials are included."),
            ("an open rehearsal of the wind band", "There's no need to book."),
            ("a swap evening for seeds and plants", "Label your bags."),
            ("a first-aid course", "Wear comfortable clothes."),
            ("a reading by two local poets", "Drinks will be served afterwards."),
            ("a guided tour of the water works", "Children under eight can't take part."),
            ("a chess tournament for beginners", "Boards are provided."),
            ("the winter market", "Dogs are welcome on a lead."),
        )
    )
    host, hour = _person(rng), rng.randint(9, 20)
    document = rng.choice(
        (
            f"On {_date(rng)} at {hour}:{rng.choice(('00', '15', '30'))} {what} will take place "
            f"at {rng.choice(PLACES)}. Entry is {rng.randint(2, 25)} euros, half for students. "
            f"{hint} Questions go to {host}, extension {rng.randint(100, 999)}.",
            f"Change of plan! We had announced {what} for {_date(rng)}, but {host} is ill. The "
            f"new date is {_date(rng)}, {hour}:00, and instead of {rng.choice(PLACES)} we'll be "
            f"in {rng.choice(PLACES)}. {hint} Tickets ({rng.randint(4, 30)} euros) stay valid.",
        )
    )
    questions = (
        "Extract the event, date, time, place, price and contact as JSON.",
        "Turn this into a calendar entry with title, when, where and notes.",
        "What do visitors have to know? List it as key: value lines.",
        "When and where is it, what does it cost, and whom can I ask?",
        "Pull every date, number and name out of this text and say what each stands for.",
    )
    return _ask(rng, questions, document)


def log_lines(rng: Random) -> str:
    services = ("billing", "search", "login", "mailer", "uploads", "scheduler")
    events = (
        *("INFO started in {} ms", "WARN retry {} of 99", "ERROR timeout after {} s"),
        *("INFO processed {} rows", "ERROR disk at {} percent", "WARN queue length {}"),
    )
    minute, lines = rng.randint(0, 20), []
    for _ in range(rng.randint(5, 8)):
        minute += rng.randint(1, 6)
        text = rng.choice(events).format(rng.randint(2, 98))
        level, rest = text.split(" ", 1)
        lines.append(f"09:{minute:02d} {level} {rng.choice(services)}: {rest}")
    questions = (
        "List the errors in this log with their time and service.",
        "Count the lines per level and per service. Answer with two small tables.",
        "What happened here? Give a timeline of everything that isn't INFO.",
        "Convert these log lines to JSON objects with time, level, service and message.",
        "Which service looks the least healthy, judging by this log?",
    )
    return _ask(rng, questions, "\n".join(lines))


def contacts(rng: Random) -> str:
    jobs = ("plumber", "architect", "caterer", "photographer", "electrician", "translator", "vet")
    people = rng.sample(SURNAMES, 3)
    lines = []
    for surname, job in zip(people, rng.sample(jobs, 3), strict=True):
        name = rng.choice(NAMES)
        where = f"{name.lower()}@{surname.lower()}.example"
        phone = f"0555 {rng.randint(100000, 999999)}"
        lines.append(
            rng.choice(
                (
                    f"Our {job} is {name} {surname}, best reached at {where}.",
                    f"Call {name} {surname}, the {job}, on {phone}, but never before ten.",
                    f"If {name} {surname} (our {job}) doesn't answer on {phone}, write to {where}.",
                    f"{name} {surname} is the new {job}, and the number is {phone}.",
                )
            )
        )
    questions = (
        "Make an address list with name, trade, phone and email. Use a dash for gaps.",
        "Extract all contact details as JSON.",
        "Who does what, and how do I get hold of them?",
        "Return a Markdown table of the people mentioned.",
        "Which phone numbers and emails occur, and which person lacks one?",
    )
    return _ask(rng, questions, " ".join(lines))


def expenses(rng: Random) -> str:
    items = (
        *("train to the client", "two nights at the hotel", "dinner with the supplier", "parking"),
        *("printing of the posters", "taxi from the airport", "museum entry", "a new charger"),
        *("coffee for the team", "postage", "batteries", "a replacement key"),
    )
    chosen = rng.sample(items, rng.randint(4, 6))
    parts = [f"{item} {money(rng.randrange(180, 24000, 10))}" for item in chosen]
    name = rng.choice(NAMES)
    document = rng.choice(
        (
            f"Expenses of {name}, {rng.choice(MONTHS)}: {', '.join(parts)}. The first item has "
            "already been paid back.",
            "\n".join([f"{name}'s trip", *(f"- {part}" for part in parts)])
            + f"\n(receipt missing: {chosen[-1]})",
        )
    )
    questions = (
        "Make a table of these expenses and add the total.",
        "Sort the amounts into travel, food and other.",
        "What's still open, and for what is there no receipt?",
        "Return the list as CSV: item,amount",
        "Which three items are the most expensive?",
    )
    return _ask(rng, questions, document)


def reviews(rng: Random) -> str:
    thing, good, bad = rng.choice(REVIEWED)
    lines = []
    for name in rng.sample(NAMES, rng.randint(3, 4)):
        said = rng.sample(good, rng.randint(0, 2)) + rng.sample(bad, rng.randint(1, 2))
        rng.shuffle(said)
        lines.append(f"{name} ({rng.randint(1, 5)}/5): {' '.join(said)}")
    questions = (
        f"Summarize these reviews of {thing} in two sentences.",
        f"What do people like and dislike about {thing}? Keep it short.",
        f"Here are some opinions on {thing}. Write a balanced summary and a one-line verdict.",
        f"Should I choose {thing}? Base your answer only on these reviews.",
        "Condense the following feedback into three bullet points.",
    )
    return _ask(rng, questions, "\n".join(lines))


def standup(rng: Random) -> str:
    done = (
        *("finished the export page", "fixed the login bug", "interviewed two candidates"),
        *("moved the archive to the new disk", "wrote the first half of the manual"),
        *("called all of last week's customers", "repaired the label printer"),
    )
    plan = (
        *(
            "will test it with real data",
            "is going to clean up the backlog",
            "starts on the slides",
        ),
        *("wants to compare three suppliers", "will train the new colleagues on Thursday"),
        *("is off from Wednesday", "will write to the landlord about the heating"),
    )
    stuck = (
        *("is still waiting for the password", "needs somebody to review the contract"),
        *("can't go on before the parts arrive", "has no budget left for this month"),
        *("hasn't heard back from the printer's", "thinks the deadline is too tight"),
    )
    people = rng.sample(NAMES, rng.randint(3, 4))
    d, p, s = (rng.sample(bank, len(people)) for bank in (done, plan, stuck))
    lines = [
        f"{who} {d[i]}, {p[i]}" + (f", but {s[i]}." if rng.random() < 0.5 else ".")
        for i, who in enumerate(people)
    ]
    questions = (
        "Summarize this status round in three lines for somebody who missed it.",
        "Write a short update for the manager, with the blockers first.",
        "Shorten these notes to one sentence per person.",
        "What has been achieved, what's next and what is in the way?",
        "Turn the notes into a friendly summary of at most 60 words.",
    )
    return _ask(rng, questions, " ".join(lines))


def incident(rng: Random) -> str:
    cause, first, then, end = rng.choice(INCIDENTS)
    hour, minute = rng.randint(5, 17), rng.randint(10, 49)
    opening = f"On {_date(rng)} at {hour}:{minute}, {first}. At first nobody knew why. By "
    document = (
        f"{opening}{hour + 1}:{minute} {_person(rng)} had found the reason: {cause}. Meanwhile "
        f"{then}. At {hour + rng.randint(2, 4)}:{minute - 8:02d} {end}. About "
        f"{rng.randrange(40, 900, 10)} people were affected, and the costs are put at "
        f"{rng.randrange(200, 9000, 50)} euros. {_person(rng)} has asked for a report by "
        f"{_date(rng)}."
    )
    questions = (
        "Summarize this incident in two sentences.",
        "Write a headline and a summary of 30 words.",
        "Explain in plain words what happened, why, and how it ended.",
        "Give me the three most important facts as bullets.",
        "Write a short, calm notice for the public based on this report.",
    )
    return _ask(rng, questions, document)


EXTRACTION: tuple[Task, ...] = (order, event, log_lines, contacts, expenses)
SUMMARIZATION: tuple[Task, ...] = (reviews, standup, incident)

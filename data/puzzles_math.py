"""Seeded mathematics prompts: each task draws its numbers and one of its wordings."""

from collections.abc import Callable
from fractions import Fraction
from random import Random

Task = Callable[[Random], str]

NAMES = (
    *("Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonah"),
    *("Kofi", "Lena", "Mateo", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tove"),
    *("Uma", "Viktor", "Wanda", "Xenia", "Yara", "Zoran"),
)
GOODS = (
    *("notebook", "mug", "candle", "scarf", "lamp", "plant pot", "puzzle", "torch", "cushion"),
    *("water bottle", "paintbrush set", "chess clock", "bicycle bell", "picture frame", "umbrella"),
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")


def money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def shopping(rng: Random) -> str:
    name, (first, second) = rng.choice(NAMES), rng.sample(GOODS, 2)
    a, b = rng.randrange(195, 2400, 5), rng.randrange(195, 2400, 5)
    n, m = rng.randint(2, 7), rng.randint(2, 7)
    note = ((n * a + m * b) // 5000 + 1) * 50
    return rng.choice(
        (
            f"{name} buys {n} of one {first} at {money(a)} each and {m} of one {second} at "
            f"{money(b)} each, and pays with {note} in notes. How much change is due?",
            f"At a flea market a {first} costs {money(a)} and a {second} costs {money(b)}. What do "
            f"{n} of the first and {m} of the second cost together? Is {note} enough?",
            f"I need {n} times the {first} ({money(a)}) and {m} times the {second} ({money(b)}). "
            f"There's a 10% discount above 40. What will I pay?",
        )
    )


def percent(rng: Random) -> str:
    price, share = rng.randrange(20, 900), rng.choice((5, 8, 12, 15, 18, 20, 25, 30, 35, 40, 60))
    goods = rng.choice(GOODS)
    return rng.choice(
        (
            f"What is {share}% of {price}? Show a way to do it without a calculator.",
            f"A {goods} used to cost {price} and is now {share}% cheaper. What's the new price?",
            f"After a rise of {share}% a membership costs {price}. What did it cost before?",
            f"Out of {price} people asked, {share}% said yes. How many is that, roughly, and how "
            "many said no?",
            f"A bill comes to {price} and I want to leave a tip of {share}%. How much in total?",
        )
    )


def equation(rng: Random) -> str:
    x, a, b = rng.randint(-12, 15), rng.randint(2, 12), rng.randint(-20, 20)
    c = rng.choice([k for k in range(-9, 10) if k not in (0, a)])
    letter = rng.choice("xyzntk")
    left, right = f"{a}{letter} {b:+d}".replace("+", "+ ").replace("-", "- "), a * x + b
    both = f"{left} = {c}{letter} {right - c * x:+d}".replace(" +", " + ").replace(" -", " - ")
    both = both.replace("  ", " ").replace("= - ", "= -").replace("+  ", "+ ").replace("-  ", "- ")
    return rng.choice(
        (
            f"Solve for {letter}: {left} = {right}",
            f"Find {letter} if {both}. Check your answer.",
            f"Which value of {letter} makes {left} equal to {right}? Explain each step.",
            f"My homework says: {both}. How do I get {letter} on its own?",
        )
    )


def travel(rng: Random) -> str:
    speed, hours = rng.randrange(30, 125, 5), rng.choice((1.5, 2, 2.5, 3, 3.5, 4, 5))
    km, start = speed * hours, rng.randint(6, 14)
    who = rng.choice(("A train", "A coach", "A delivery van", "A motorcyclist", "A ferry"))
    return rng.choice(
        (
            f"{who} covers {km:g} km in {hours:g} hours. What is the average speed, and how far "
            f"would it get in {rng.randint(20, 55)} minutes at that speed?",
            f"{who} leaves at {start}:{rng.choice(('05', '10', '20', '35', '50'))} and travels "
            f"{km:g} km at {speed} km/h. When does it arrive?",
            f"Two cyclists start {rng.randrange(30, 90, 6)} km apart and ride towards each other "
            f"at {rng.randint(12, 19)} and {rng.randint(14, 24)} km/h. When do they meet?",
            f"{who} does half of a {km:g} km route at {speed} km/h and the other half at "
            f"{speed + 20} km/h. What's the average speed?",
        )
    )


def area(rng: Random) -> str:
    a, b, r = rng.randint(3, 30), rng.randint(3, 30), rng.randint(2, 15)
    return rng.choice(
        (
            f"A rectangular field measures {a + 20} m by {b + 20} m. Find its area, its perimeter "
            "and the length of its diagonal.",
            f"What are the area and the circumference of a circle with radius {r} cm?",
            f"A box is {a} cm long, {b} cm wide and {r} cm high. Compute its volume and surface.",
            f"A right triangle has legs of {a} cm and {b} cm. How long is the hypotenuse?",
            f"A path {rng.randint(1, 3)} m wide runs around a pool of {a} m by {b} m. How large "
            "is the path?",
            f"How many tiles of {rng.choice((20, 25, 30, 40))} cm by 20 cm do I need for a floor "
            f"of {a} m by {r} m? Add 10% for waste.",
        )
    )


def fractions(rng: Random) -> str:
    a, b = (
        Fraction(rng.choice((1, 5, 7, 11, 13)), rng.choice((2, 3, 4, 6, 8, 9, 12))) for _ in "ab"
    )
    sign = rng.choice("+-*")
    return rng.choice(
        (
            f"Compute {a} {sign} {b} and give the result in lowest terms.",
            f"Which is larger, {a} or {b}? Show how you compare them.",
            f"Divide {a} by {b}. Why does turning the second fraction over work?",
            f"Write {a} as a decimal and as a percentage, rounded to two places.",
            f"One jug holds {a} of a litre and another {b} of a litre. What's the total?",
        )
    )


def scaling(rng: Random) -> str:
    people, guests = rng.sample(range(2, 15), 2)
    flour, eggs = rng.randrange(120, 700, 10), rng.randint(2, 6)
    dish = rng.choice(("pancakes", "dumplings", "a tray of scones", "fresh noodles", "waffles"))
    return rng.choice(
        (
            f"A recipe for {dish} for {people} people takes {flour} g of flour and {eggs} eggs. "
            f"How much do I need for {guests}?",
            f"On a map with a scale of 1:{rng.choice((25, 50, 100, 200))},000, two villages are "
            f"{rng.randint(21, 148) / 10} cm apart. How far is that in reality?",
            f"Paint is mixed from {rng.choice(COLOURS[:5])} and grey in the ratio "
            f"{eggs}:{eggs + rng.randint(1, 5)}. How much of each goes into {flour} ml?",
            f"If {people} machines fill {flour} bottles an hour, how many do {guests} fill?",
        )
    )


def interest(rng: Random) -> str:
    sum_, rate, years = rng.randrange(500, 20000, 250), rng.randint(2, 18) / 2, rng.randint(2, 12)
    name = rng.choice(NAMES)
    return rng.choice(
        (
            f"{name} invests {sum_} at {rate:g}% a year, compounded annually. What is it worth "
            f"after {years} years?",
            f"How long does it take until {sum_} doubles at {rate:g}% compound interest? Use the "
            "rule of 72 and then check it.",
            f"Compare simple and compound interest on {sum_} at {rate:g}% over {years} years.",
            f"{name} saves {sum_ // rng.randint(15, 70)} a month without interest. When are {sum_} "
            "reached?",
        )
    )


def averages(rng: Random) -> str:
    values = [rng.randint(2, 60) for _ in range(rng.randint(5, 9))]
    shown, mean = ", ".join(map(str, values)), rng.randint(60, 85)
    return rng.choice(
        (
            f"Find the mean, the median and the mode of {shown}.",
            f"The numbers of visitors per day were {shown}. What are the average and the range?",
            f"After {len(values)} tests my average is {mean}. What do I need in the next one to "
            f"reach {mean + 1}?",
            f"Which value in {shown} lies furthest from the mean? Show the work.",
            f"Calculate the standard deviation of {shown}, step by step.",
        )
    )


def conversion(rng: Random) -> str:
    n = rng.randint(3, 480)
    return rng.choice(
        (
            f"Convert {n} miles to kilometres and {n + 7} kilometres to miles.",
            f"How many hours, minutes and seconds are {n * 97} seconds?",
            f"What is {n % 120 - 10} degrees Celsius in Fahrenheit? Give the formula too.",
            f"A runner needs {n % 5 + 3} min {n % 59:02d} s per kilometre. What's that in km/h?",
            f"Write {n + 30} in binary, octal and hexadecimal, with the working.",
            f"How many litres are {n / 10} gallons (US), and how many cups is that?",
            f"My file is {n * 13} MB and my connection does {n % 40 + 8} Mbit/s. How long will the "
            "download take?",
        )
    )


def sequence(rng: Random) -> str:
    first, step, ratio = rng.randint(-9, 30), rng.randint(2, 14), rng.randint(2, 4)
    rows = (
        [first + step * i for i in range(5)],
        [(abs(first) % 7 + 1) * ratio**i for i in range(5)],
        [first + i * i * (step % 3 + 1) for i in range(1, 6)],
        [first + step * i + i * (i - 1) // 2 for i in range(5)],
    )
    shown = ", ".join(map(str, rng.choice(rows)))
    return rng.choice(
        (
            f"What is the next number in this sequence, and why? {shown}, ...",
            f"Find a rule for the sequence {shown}, ... and give its tenth term.",
            f"Continue by three terms and explain the pattern: {shown}",
        )
    )


def marbles(rng: Random) -> str:
    (c1, c2, c3), (a, b, c) = rng.sample(COLOURS, 3), (rng.randint(2, 9) for _ in range(3))
    dice, coins = rng.randint(4, 11), rng.randint(3, 6)
    return rng.choice(
        (
            f"A bag holds {a} {c1}, {b} {c2} and {c} {c3} marbles. I draw two without looking. "
            f"What's the probability that both are {c1}?",
            f"From a box with {a} {c1} and {b + c} {c2} pens I take one, put it back, and take "
            "another one. How likely are two different colours?",
            f"Two dice are thrown. How likely is a sum of {dice}? And of more than {dice}?",
            f"If I toss {coins} coins, what are the chances of exactly {rng.randint(1, 2)} heads?",
            f"In how many ways can a committee of {rng.randint(2, 3)} be chosen from {a + 3} "
            "people? Does the answer change if one of them is the chair?",
        )
    )


def divisors(rng: Random) -> str:
    g = rng.randint(2, 24)
    a, b = (g * k for k in rng.sample(range(2, 16), 2))
    return rng.choice(
        (
            f"Find the greatest common divisor and the least common multiple of {a} and {b}.",
            f"Write {a * b} as a product of primes.",
            f"Is {a * 7 + rng.choice((1, 2, 3))} a prime number? Explain how you checked.",
            f"One bus leaves every {g + 3} minutes and another every {g + 8} minutes. Both left "
            "at noon. When do they next leave at the same time?",
            f"List all the divisors of {a} and say how many there are.",
            f"What is the remainder when {a * b + g - 1} is divided by {g + 1}?",
        )
    )


def work_rate(rng: Random) -> str:
    (first, second), (a, b) = rng.sample(NAMES, 2), rng.sample(range(2, 13), 2)
    return rng.choice(
        (
            f"{first} can paint a fence in {a} hours, {second} in {b}. How long do they need "
            "together?",
            f"One tap fills a pool in {a + 4} hours, a second one in {b + 4}. A drain empties it "
            f"in {a + b + 20}. How long does it take with all three open?",
            f"{a + 2} gardeners need {b} days for a park. How many days do {a + 4} gardeners need?",
            f"{first} types {a * 12} words a minute and {second} {b * 12}. They share a text of "
            f"{(a + b) * 240} words so that both finish together. How much does each type?",
        )
    )


def arithmetic(rng: Random) -> str:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    expression = rng.choice(
        (
            f"{a} + {b} * {c} - {d}",
            f"({a} + {b}) * ({c} - {d})",
            f"{a * b} / {b} + {c} * {d}",
            f"{a} - ({b} - ({c} + {d}))",
            f"{a % 12 + 2}^2 + {b % 9 + 2}^3 - {c}",
            f"{a * 10} - {b} * ({c} - {d})",
        )
    )
    return rng.choice(
        (
            f"Calculate {expression}. Show the order of operations.",
            f"What is {expression}?",
            f"Work out {expression} step by step.",
            f"My calculator and I disagree about {expression}. What's right?",
        )
    )


def quadratic(rng: Random) -> str:
    p, q = rng.randint(-9, 9), rng.randint(-9, 9)
    b, c = -(p + q), p * q
    middle = f" {'+' if b > 0 else '-'} {abs(b) if abs(b) > 1 else ''}x" if b else ""
    tail = f" {'+' if c > 0 else '-'} {abs(c)}" if c else ""
    expression = f"x^2{middle}{tail}"
    return rng.choice(
        (
            f"Solve {expression} = 0.",
            f"Factor {expression}, or explain why it can't be factored.",
            f"Where does the graph of y = {expression} cross the axes, and where is its vertex?",
            f"Complete the square for {expression}.",
            f"For which x is {expression} negative?",
            f"Differentiate f(x) = {rng.randint(2, 9)}x^3{middle or ' - x'}{tail} and find f'(2).",
        )
    )


def tickets(rng: Random) -> str:
    adults, children = rng.randint(12, 90), rng.randint(8, 80)
    a, c = rng.randint(8, 20), rng.randint(3, 7)
    place = rng.choice(("a puppet theatre", "a swimming pool", "a castle", "a small zoo"))
    first, second = rng.sample(NAMES, 2)
    return rng.choice(
        (
            f"Adults pay {a} and children {c} at {place}. Yesterday {adults + children} people "
            f"came and the till took {adults * a + children * c}. How many children were there?",
            f"{first} is {adults // 3 + 4} years older than {second}. In {c} years {first} will be "
            f"twice as old as {second}. How old are they now?",
            f"Two numbers add up to {adults + children} and differ by {abs(adults - children)}. "
            "Which numbers are they?",
            f"{adults} coins, some worth 20 cents and some 50 cents, add up to "
            f"{money(20 * adults + 30 * (adults // 3))}. How many of each are there?",
        )
    )


TASKS: tuple[Task, ...] = (
    *(shopping, percent, equation, travel, area, fractions, scaling, interest, averages),
    *(conversion, sequence, marbles, divisors, work_rate, arithmetic, quadratic, tickets),
)

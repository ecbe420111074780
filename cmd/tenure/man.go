//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
)

func manCommand() command {
	return command{
		name:    "man",
		summary: "print the manual page of this program",
		about: `
Man prints the manual page tenure(1), with all commands and flags, as roff:

  tenure man | man -l -`,
		act: func(_ context.Context, _ *options, out *output, _ []string) error {
			_, err := io.WriteString(out.stdout, manual())
			return err
		},
	}
}

func manual() string {
	var b strings.Builder
	about, usage, _ := strings.Cut(overviewText(), "Usage:")
	_, more, _ := strings.Cut(usage, "[flags]\n\n")
	fmt.Fprintf(&b, ".TH TENURE 1\n.SH NAME\ntenure \\- run a program in one place at a time\n.SH SYNOPSIS\n.B tenure\nCOMMAND [flags]\n.SH DESCRIPTION\n%s.PP\n.nf\n%s.fi\n.SH COMMANDS\n",
		forRoff(about), forRoff(more))
	for _, c := range commands() {
		if c.summary == "" {
			continue
		}
		fmt.Fprintf(&b, ".SS tenure %s %s\n%s\n", c.name, forRoff(c.synopsis), forRoff(strings.TrimSpace(c.about)))
		new(options).flagSet(c).VisitAll(func(f *flag.Flag) {
			value, usage := explainFlag(f)
			fmt.Fprintf(&b, ".TP\n\\fB\\-%s\\fR \\fI%s\\fR\n%s\n", forRoff(f.Name), forRoff(value), forRoff(usage))
		})
	}
	return b.String()
}

// forRoff escapes a text. Roff itself fills paragraphs, and keeps lines that begin with a space.
func forRoff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n.", "\n\\&.", "\n'", "\n\\&'").Replace("\n" + text)[1:]
	var ascii strings.Builder
	for _, r := range text {
		if r < 128 {
			ascii.WriteRune(r)
		} else {
			fmt.Fprintf(&ascii, `\[u%04X]`, r)
		}
	}
	return ascii.String()
}

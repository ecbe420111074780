//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
)

func completionCommand() command {
	return command{
		name:     "completion",
		synopsis: "bash | zsh | fish",
		summary:  "print a script that lets a shell complete commands and flags",
		about: `
Completion prints a script for a shell, which its startup file can load:

  bash  source <(tenure completion bash)
  zsh   source <(tenure completion zsh)     # after compinit
  fish  tenure completion fish | source`,
		takes: true,
		act: func(_ context.Context, _ *options, out *output, args []string) error {
			scripts := map[string]func() string{"bash": bashCompletion, "zsh": zshCompletion, "fish": fishCompletion}
			if len(args) != 1 || scripts[args[0]] == nil {
				return usageError("give one of bash, zsh and fish")
			}
			_, err := io.WriteString(out.stdout, scripts[args[0]]())
			return err
		},
	}
}

// byCommand returns the names of the commands, and the branches of a shell's case that set a variable to the
// flags of a command. Neither has characters that mean something to a shell.
func byCommand() (names, branches string) {
	for _, c := range commands() {
		if c.summary != "" {
			names += " " + c.name
			branches += fmt.Sprintf("\t%s) known='-%s' ;;\n", c.name, strings.Join(strings.Fields(c.flags+" h"), " -"))
		}
	}
	return names, branches
}

// Words that are no flags, such as the program and the values of flags, are completed as files.
func bashCompletion() string {
	names, branches := byCommand()
	return `_tenure() {
	local known='` + names + `' word=${COMP_WORDS[COMP_CWORD]}
	[ $COMP_CWORD = 1 ] || case ${COMP_WORDS[1]} in
` + branches + `	esac
	[ $COMP_CWORD = 1 ] || [ "${word#-}" != "$word" ] || known=
	COMPREPLY=($(compgen -W "$known" -- "$word"))
}
complete -o default -F _tenure tenure
`
}

func zshCompletion() string {
	names, branches := byCommand()
	return `_tenure() {
	local known='` + names + `'
	(( CURRENT == 2 )) || case $words[2] in
` + branches + `	esac
	if (( CURRENT == 2 )) || [[ $words[CURRENT] == -* ]]; then
		compadd -- ${=known}
	else
		_files
	fi
}
compdef _tenure tenure
`
}

func fishCompletion() string {
	var b strings.Builder
	for _, c := range commands() {
		if c.summary == "" {
			continue
		}
		fmt.Fprintf(&b, "complete -c tenure -f -n __fish_use_subcommand -a %s -d %s\n", c.name, forFish(c.summary))
		new(options).flagSet(c).VisitAll(func(f *flag.Flag) {
			value, usage := explainFlag(f)
			needs := ""
			if value != "" {
				needs = " -r"
			}
			fmt.Fprintf(&b, "complete -c tenure -n '__fish_seen_subcommand_from %s' -o %s%s -d %s\n", c.name, f.Name, needs, forFish(strings.SplitN(usage, "\n", 2)[0]))
		})
	}
	return b.String()
}

// forFish quotes a text.
func forFish(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(text) + "'"
}

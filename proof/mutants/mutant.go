package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// mutant is one fault that is put into the library. The file testdata/mutants.txt beside the
// code has it in this form, with lines of the old and the new text as a diff has them:
//
//	mutant what the library does wrong with it
//	why    why that is harmful
//	file   file.go
//	killer package Test
//	-the old text, which occurs in the file exactly once
//	+the new text
//
// A line that begins with # is a comment. The killer is the test that has killed the mutant before.
type mutant struct {
	name, why string
	list      string // the path of the file that has this mutant
	file      string // the path of the file that is changed
	old, new  string
	killer    killer
}

// killer is a test that kills a mutant.
type killer struct{ dir, test string }

const listName = "testdata/mutants.txt"

// readMutants reads the lists of all packages of the module and of the modules nested in it.
func readMutants(module string) (all []mutant, err error) {
	known := make(map[string]bool)
	err = filepath.WalkDir(module, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(filepath.ToSlash(path), listName) {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		list, err := filepath.Rel(module, path)
		if err != nil {
			return err
		}
		mutants, err := parse(list, string(data))
		for _, m := range mutants {
			if known[m.name] {
				err = errors.Join(err, fmt.Errorf("%s: there are two mutants %q", list, m.name))
			}
			known[m.name] = true
		}
		all = append(all, mutants...)
		return err
	})
	return all, err
}

func parse(list, data string) (mutants []mutant, err error) {
	dir := filepath.Dir(filepath.Dir(list))
	var m *mutant
	var old, new []string
	end := func() {
		if m != nil {
			m.old, m.new = strings.Join(old, "\n"), strings.Join(new, "\n")
		}
		old, new = nil, nil
	}
	n := 0
	for line := range strings.Lines(data) {
		n++
		line = strings.TrimSuffix(line, "\n")
		word, rest, _ := strings.Cut(line, " ")
		rest = strings.TrimLeft(rest, " ")
		switch {
		case line == "" || line[0] == '#':
		case word == "mutant":
			end()
			mutants = append(mutants, mutant{name: rest, list: list})
			m = &mutants[len(mutants)-1]
		case m == nil:
			return nil, fmt.Errorf("%s:%d: no mutant begins here", list, n)
		case line[0] == '-':
			old = append(old, line[1:])
		case line[0] == '+':
			new = append(new, line[1:])
		case word == "why":
			m.why = rest
		case word == "file":
			m.file = filepath.Join(dir, rest)
		case word == "killer":
			m.killer.dir, m.killer.test, _ = strings.Cut(rest, " ")
		default:
			return nil, fmt.Errorf("%s:%d: %q is no part of a mutant", list, n, word)
		}
	}
	end()
	return mutants, nil
}

// record notes in the list which test kills the mutant.
func (m mutant) record(module string, by killer) error {
	path := filepath.Join(module, m.list)
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	inside := false
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "mutant ") {
			inside = strings.TrimSpace(strings.TrimPrefix(line, "mutant ")) == m.name
		}
		if inside && strings.HasPrefix(line, "killer ") {
			continue
		}
		if inside && line[0] == '-' {
			fmt.Fprintf(&b, "killer %s %s\n", by.dir, by.test)
			inside = false
		}
		b.WriteString(line)
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// mutate returns the source with the mutant's fault in it.
func (m mutant) mutate(source string) (string, error) {
	if n := strings.Count(source, m.old); m.old == "" || n != 1 {
		return "", fmt.Errorf("%s: %s contains %q %d times, not once", m.name, m.file, m.old, n)
	}
	return strings.Replace(source, m.old, m.new, 1), nil
}

// check returns an error that names each mutant that cannot be tried.
func check(module string, mutants []mutant) error {
	if len(mutants) == 0 {
		return errors.New("there are no mutants here; run this command in the root of the module")
	}
	var errs []error
	for _, m := range mutants {
		source, err := os.ReadFile(filepath.Join(module, m.file))
		if err == nil {
			_, err = m.mutate(string(source))
		}
		if err == nil && (m.name == "" || m.why == "") {
			err = fmt.Errorf("%s: a mutant without a name or a reason", m.list)
		}
		isKiller := func(s *suite) bool { return s.dir == m.killer.dir }
		if err == nil && m.killer.dir != "" && !slices.ContainsFunc(suites, isKiller) {
			err = fmt.Errorf("%s: %q is killed by a test of %s, which is no suite", m.list, m.name, m.killer.dir)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
)

const killersFile = "internal/verify/mutants/killers.txt"

// killers has the test that kills each mutant, behind the name of its suite.
type killers map[string]string

func readKillers(path string) (killers, error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	known := killers{}
	for line := range strings.Lines(string(data)) {
		if name, by, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			known[name] = by
		}
	}
	return known, nil
}

// write writes the killers of those mutants that still exist.
func (k killers) write(path string) error {
	exists := make(map[string]bool)
	for _, m := range mutants {
		exists[m.name] = true
	}
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(k)) {
		if exists[name] {
			fmt.Fprintf(&b, "%s\t%s\n", name, k[name])
		}
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// of returns the suite and the test that are known to kill a mutant; the test is empty if
// none is, or if it has no name of its own.
func (k killers) of(mutant string) (suite, test string) {
	suite, by, _ := strings.Cut(k[mutant], ": ")
	test, _, _ = strings.Cut(by, "/")
	if strings.ContainsAny(test, " :()") || !strings.HasPrefix(test, "Test") && !strings.HasPrefix(test, "Fuzz") && !strings.HasPrefix(test, "Example") {
		return suite, ""
	}
	return suite, test
}

// tests returns a regexp of the tests of a suite that are known to kill mutants.
func (k killers) tests(suite string) string {
	var all []string
	for _, m := range mutants {
		if of, test := k.of(m.name); of == suite && test != "" && !slices.Contains(all, test) {
			all = append(all, test)
		}
	}
	return "^(" + strings.Join(all, "|") + ")$"
}

// killedAgain tries the test that has killed the mutant before. It returns "" if it does not.
// Restore takes the mutant out.
func (m mutant) killedAgain(dir string, all []suite, known killers, restore func() error) (by string, err error) {
	name, test := known.of(m.name)
	i := slices.IndexFunc(all, func(s suite) bool { return s.name == name && s.isFor(m) })
	if i < 0 || test == "" {
		return "", nil
	}
	s := &all[i]
	alone := s.only("^" + test + "$")
	alone.limit = "2m"
	failed, out := alone.fails(dir)
	if strings.Contains(out, "[build failed]") {
		return "", fmt.Errorf("does not compile:\n%s", out)
	}
	if failed == "" {
		return "", nil
	}
	if !s.knownPassed {
		if err := restore(); err != nil {
			return "", err
		}
		if test, out := s.only(known.tests(name)).fails(dir); test != "" {
			return "", fmt.Errorf("%s fails without a mutant: %s\n%s", name, test, out)
		}
		s.knownPassed = true
	}
	return name + ": " + failed, nil
}

// only returns the suite with only those of its tests.
func (s suite) only(tests string) suite {
	var packages, binary []string
	for i, arg := range s.args {
		if arg == "-args" {
			binary = s.args[i:]
			break
		}
		if strings.HasPrefix(arg, ".") {
			packages = append(packages, arg)
		}
	}
	s.args = slices.Concat([]string{"-run", tests}, packages, binary)
	return s
}

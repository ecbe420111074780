// Command release commits and tags a version of the published modules, in the repository
// that contains the current directory:
//
//	go run . v0.1.0
//
// While the library is developed, its nested modules replace the root module, and each other,
// by their directories. A program that depends on one of them ignores that replacement, and go
// install refuses it, so in a release they require each other at its version. The commit is on a
// branch of its own, release-v0.1.0, and each module has a tag. The checked-out branch does not
// change, and nothing is pushed.
package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/zip"
)

const root = "github.com/tenurelib/tenure"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: make release VERSION=v0.1.0")
		os.Exit(2)
	}
	refs, err := release(".", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
	fmt.Println("To publish the release: git push --atomic origin", strings.Join(refs, " "))
}

// release makes the branch and the tags, and returns their names, or makes none of them.
func release(dir, version string) (refs []string, err error) {
	if semver.Canonical(version) != version || version == "" {
		return nil, fmt.Errorf("%q is not a semantic version such as v0.1.0", version)
	}
	if major := semver.Major(version); major != "v0" && major != "v1" {
		return nil, fmt.Errorf("%s needs %s/%s as the module's path", version, root, major)
	}
	top, err := git(dir, "rev-parse", "--show-toplevel")
	if err != nil {
		return nil, err
	}
	changes, err := git(top, "status", "--porcelain")
	if err != nil {
		return nil, err
	}
	if changes != "" {
		return nil, fmt.Errorf("there are uncommitted changes; commit or stash them first:\n%s", changes)
	}
	modules, err := inOrder(top)
	if err != nil {
		return nil, err
	}
	refs = []string{"refs/heads/release-" + version}
	for _, m := range modules {
		refs = append(refs, "refs/tags/"+path.Join(m.dir, version))
	}
	taken, err := git(top, append([]string{"for-each-ref", "--format=%(refname)"}, refs...)...)
	if err != nil {
		return nil, err
	}
	if taken != "" {
		return nil, fmt.Errorf("there is already %s", strings.Join(strings.Fields(taken), " and "))
	}

	// The commit is made in a worktree of its own, so that a failure leaves nothing behind.
	temp, err := os.MkdirTemp("", "tenure-release-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	tree := filepath.Join(temp, "tree")
	if _, err := git(top, "worktree", "add", "--quiet", "--detach", tree, "HEAD"); err != nil {
		return nil, err
	}
	defer git(top, "worktree", "remove", "--force", tree)
	sums := make(map[string]string) // of those modules that are as they will be published
	for _, m := range modules {
		if err := require(filepath.Join(tree, m.dir), version, sums); err != nil {
			return nil, err
		}
		if sums[m.path], err = checksums(top, tree, temp, m, version); err != nil {
			return nil, err
		}
	}
	if _, err := git(tree, "commit", "--quiet", "--allow-empty", "--all", "--message", "Release "+version); err != nil {
		return nil, err
	}
	commit, err := git(tree, "rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	for _, ref := range refs {
		if _, err := git(top, "update-ref", ref, commit, ""); err != nil { // the empty value: only if it doesn't exist
			return nil, err
		}
	}
	return refs, nil
}

// published is a module that programs depend on.
type published struct {
	path string
	dir  string // relative to the repository
}

// inOrder returns all modules but those of examples and of what verifies the library. Each
// comes after those that it requires, because its go.sum has their checksums.
func inOrder(top string) (modules []published, err error) {
	names, err := git(top, "ls-files", "go.mod", "*/go.mod")
	if err != nil {
		return nil, err
	}
	files, dirs := make(map[string]*modfile.File), make(map[string]string) // by the module's path
	for _, name := range strings.Fields(names) {
		if strings.HasPrefix(name, "internal/") || strings.HasPrefix(name, "examples/") {
			continue
		}
		file, err := parse(filepath.Join(top, name))
		if err != nil {
			return nil, err
		}
		files[file.Module.Mod.Path], dirs[file.Module.Mod.Path] = file, path.Dir(name)
	}
	var add func(path string)
	add = func(path string) {
		file := files[path]
		delete(files, path)
		if file == nil { // it has been added, or is another project's
			return
		}
		for _, needs := range file.Require {
			add(needs.Mod.Path)
		}
		modules = append(modules, published{path, dirs[path]})
	}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		add(path)
	}
	return modules, nil
}

func parse(name string) (*modfile.File, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return modfile.Parse(name, data, nil)
}

// checksums returns what a go.sum says of a module that is in tree as it will be published.
func checksums(top, tree, temp string, m published, version string) (string, error) {
	if _, err := git(tree, "add", "--all"); err != nil {
		return "", err
	}
	all, err := git(tree, "write-tree")
	if err != nil {
		return "", err
	}
	file, err := os.Create(filepath.Join(temp, "module.zip"))
	if err != nil {
		return "", err
	}
	defer file.Close()
	subdir := strings.TrimPrefix(m.dir, ".")
	// Not from the worktree, which the zip package does not recognise as a repository.
	if err := zip.CreateFromVCS(file, module.Version{Path: m.path, Version: version}, top, all, subdir); err != nil {
		return "", err
	}
	content, err := dirhash.HashZip(file.Name(), dirhash.Hash1)
	if err != nil {
		return "", err
	}
	goMod, err := dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) {
		return os.Open(filepath.Join(tree, m.dir, "go.mod"))
	})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%[1]s %[2]s %[3]s\n%[1]s %[2]s/go.mod %[4]s\n", m.path, version, content, goMod), nil
}

// require makes the module in dir require those of this repository at that version. Sums has
// the checksums of those that it may require.
func require(dir, version string, sums map[string]string) error {
	name := filepath.Join(dir, "go.mod")
	file, err := parse(name)
	if err != nil {
		return err
	}
	needed := ""
	for path, sum := range sums {
		if !slices.ContainsFunc(file.Require, func(r *modfile.Require) bool { return r.Mod.Path == path }) {
			continue
		}
		needed += sum
		if err := errors.Join(file.AddRequire(path, version), file.DropReplace(path, "")); err != nil {
			return err
		}
	}
	file.Cleanup()
	if len(file.Replace) > 0 {
		return fmt.Errorf("%s replaces %s: a program that depends on it would not", name, file.Replace[0].Old)
	}
	if needed == "" {
		return nil
	}
	data, err := file.Format()
	if err == nil {
		err = os.WriteFile(name, data, 0o644)
	}
	if err != nil {
		return err
	}
	name = filepath.Join(dir, "go.sum")
	if data, err = os.ReadFile(name); err != nil {
		return err
	}
	return os.WriteFile(name, append(data, needed...), 0o644)
}

// git runs git in dir and returns its output, without the newline at the end.
func git(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w\n%s", args[0], err, &stderr)
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}

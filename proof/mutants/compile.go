package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// compile returns an error that names each mutant that would not compile, so that no test could fail because of it. It
// checks the types of the changed packages in this process, which takes seconds where builds take hours.
func compile(module string, mutants []mutant) error {
	byDir := make(map[string][]mutant)
	for _, m := range mutants {
		byDir[filepath.Dir(m.file)] = append(byDir[filepath.Dir(m.file)], m)
	}
	var errs []error
	for dir, mutants := range byDir {
		p, err := loadPackage(filepath.Join(module, dir))
		if err != nil {
			return err
		}
		for _, m := range mutants {
			if err := p.check(m); err != nil {
				errs = append(errs, fmt.Errorf("%s: %q does not compile: %w", m.list, m.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// pkg is a package whose files can be checked with a mutant in one of them.
type pkg struct {
	path    string
	fset    *token.FileSet
	files   map[string]*ast.File // by name; only those of this platform
	sources map[string]string
	imports types.Importer
}

func loadPackage(dir string) (*pkg, error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Export,GoFiles,DepOnly", ".")
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w", dir, err)
	}
	p := &pkg{fset: token.NewFileSet(), files: make(map[string]*ast.File), sources: make(map[string]string)}
	exports := make(map[string]string)
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var listed struct {
			ImportPath, Export string
			GoFiles            []string
			DepOnly            bool
		}
		if err := dec.Decode(&listed); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		exports[listed.ImportPath] = listed.Export
		if listed.DepOnly {
			continue
		}
		p.path = listed.ImportPath
		for _, name := range listed.GoFiles {
			source, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return nil, err
			}
			p.sources[name] = string(source)
			if p.files[name], err = parser.ParseFile(p.fset, name, source, parser.SkipObjectResolution); err != nil {
				return nil, err
			}
		}
	}
	p.imports = importer.ForCompiler(p.fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	return p, nil
}

func (p *pkg) check(m mutant) error {
	name := filepath.Base(m.file)
	if p.files[name] == nil { // of another platform
		return nil
	}
	mutated, err := m.mutate(p.sources[name])
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(p.fset, name, mutated, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	files := []*ast.File{file}
	for other, f := range p.files {
		if other != name {
			files = append(files, f)
		}
	}
	slices.SortFunc(files, func(a, b *ast.File) int { return int(a.Pos() - b.Pos()) })
	_, err = (&types.Config{Importer: p.imports}).Check(p.path, p.fset, files, nil)
	return err
}

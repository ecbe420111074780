package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheKillerOfOneMutantIsWritten(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "p", "testdata"), 0o755))
	const list = "# Comment.\n\nmutant a\nwhy    w\nfile   f.go\n-\told\n\nmutant b\nwhy    w\nfile   f.go\nkiller . TestB\n-x\n-\n+\ty\n+z\n"
	path := filepath.Join("p", listName)
	require.NoError(t, os.WriteFile(filepath.Join(dir, path), []byte(list), 0o644))
	mutants, err := readMutants(dir)
	require.NoError(t, err)
	require.Equal(t, []mutant{
		{name: "a", why: "w", list: path, file: "p/f.go", old: "\told"},
		{name: "b", why: "w", list: path, file: "p/f.go", old: "x\n", new: "\ty\nz", killer: killer{".", "TestB"}},
	}, mutants)
	require.NoError(t, mutants[0].record(dir, killer{"p", "TestA"}))
	require.NoError(t, mutants[1].record(dir, killer{"p", "TestC"}))
	data, err := os.ReadFile(filepath.Join(dir, path))
	require.NoError(t, err)
	require.Equal(t, "# Comment.\n\nmutant a\nwhy    w\nfile   f.go\nkiller p TestA\n-\told\n\nmutant b\nwhy    w\nfile   f.go\nkiller p TestC\n-x\n-\n+\ty\n+z\n", string(data))
}

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnInstanceIsInItsDirectoryUntilItIsDeleted(t *testing.T) {
	parent := t.TempDir()
	precious := filepath.Join(parent, "precious")
	require.NoError(t, os.WriteFile(precious, nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(parent, "state"), 0o700))
	dir, err := os.OpenRoot(filepath.Join(parent, "state"))
	require.NoError(t, err)
	defer dir.Close()
	d := dirDriver{dir}

	require.NoError(t, d.Create(t.Context(), "box.1"))
	exists, err := d.Has(t.Context(), "box.1")
	require.True(t, exists && err == nil, err)
	instances, err := d.List(t.Context())
	require.NoError(t, err)
	require.Contains(t, instances, "box.1")
	for range 2 {
		require.NoError(t, d.Delete(t.Context(), "box.1"))
	}
	exists, err = d.Has(t.Context(), "box.1")
	require.True(t, !exists && err == nil, err)

	require.Error(t, d.Create(t.Context(), "../box.1"))
	require.Error(t, d.Delete(t.Context(), "../precious"))
	require.FileExists(t, precious)
}
